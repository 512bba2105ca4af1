"""Time of four statistics: attention with entropy, received, max_logit and top-8 beside attention alone.

    python -m benchmarks.record_time [--length 4096]

All ways are timed in turn in one process. The last column is the time relative to PyTorch's
`F.scaled_dot_product_attention`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.table import Table

import clearhead
from benchmarks.timing import console, interleaved, machine

BATCH, HEADS, HEAD_DIM = 1, 8, 64
STATISTICS = ("entropy", "received", "max_logit", "top_k")
SDPA = "F.scaled_dot_product_attention"


class Attend(torch.nn.Module):
    """A model of one attention and nothing else."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)


def ways(length: int) -> dict[str, Callable[[], object]]:
    query, key, value = (torch.randn(BATCH, HEADS, length, HEAD_DIM) for _ in range(3))
    model = Attend()

    def recorded() -> object:
        with clearhead.record(model, STATISTICS, top_k=8) as rec:
            model(query, key, value)
        return rec

    def on(kernel: str) -> Callable[[], object]:
        def run() -> object:
            with clearhead.use_kernel(kernel):
                return clearhead.attention(query, key, value)

        return run

    statistics: dict[str, Callable[[], object]] = {
        f"attention_statistics: {name}": lambda name=name: clearhead.attention_statistics(
            query, key, statistics=(name,), top_k=8
        )
        for name in STATISTICS
    }
    return {
        SDPA: lambda: F.scaled_dot_product_attention(query, key, value),
        "clearhead.attention": lambda: clearhead.attention(query, key, value),
        "clearhead.attention, chunked": on("chunked"),
        "attention and the four statistics (record)": recorded,
        "attention_statistics: all four": lambda: clearhead.attention_statistics(
            query, key, statistics=STATISTICS, top_k=8
        ),
        **statistics,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="L = S (default 4096)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is timed (default 7)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    with torch.no_grad():
        times = interleaved(ways(arguments.length), rounds=arguments.rounds, budget=120.0)
    table = Table(
        title=f"B={BATCH} H={HEADS} L=S={arguments.length} D={HEAD_DIM}, float32, medians of {arguments.rounds}",
        caption=f"{machine()}; load average at the start {load:.1f}",
    )
    for column in ("what", "milliseconds", "relative to SDPA"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds * 1e3:.0f}", f"{seconds / times[SDPA]:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
