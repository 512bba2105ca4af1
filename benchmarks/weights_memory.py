"""Peak memory of averaged weights: `clearhead.attention_weights` beside the (B, H, L, S) tensor.

    python -m benchmarks.weights_memory [--length 8192]

Each way runs in a process of its own; reported is the growth of its peak resident memory over what it had when its
inputs were ready.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.table import Table

import clearhead
from benchmarks.memory import growth_of_peak, in_a_process
from benchmarks.timing import console, machine

HEADS, HEAD_DIM = 8, 64


def peak_growth(name: str, length: int) -> float:
    """Megabytes (10⁶ bytes) that one way needs on top of its inputs."""
    torch.manual_seed(0)
    query, key = torch.randn(1, HEADS, length, HEAD_DIM), torch.randn(1, HEADS, length, HEAD_DIM)
    WAYS[name](query[:, :, :64], key[:, :, :64])  # libraries and thread pools are loaded once
    return growth_of_peak(lambda: WAYS[name](query, key))[0]


def averaged_weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return clearhead.attention_weights(query, key, average_attn_weights=True)


def full_tensor(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query @ key.transpose(-2, -1) / HEAD_DIM**0.5).softmax(-1).mean(1)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "clearhead.attention_weights": averaged_weights,
    "softmax of the full tensor": full_tensor,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192, help="L = S (default 8192)")
    length = parser.parse_args().length
    table = Table(
        title=f"Weights averaged over heads, B=1 H={HEADS} L=S={length} D={HEAD_DIM}, float32", caption=machine()
    )
    table.add_column("way")
    table.add_column("peak additional memory, MB", justify="right")
    for name in WAYS:
        table.add_row(name, f"{in_a_process(peak_growth, name, length):.0f}")
    table.add_row("(the averaged map itself)", f"{length * length * 4 / 1e6:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
