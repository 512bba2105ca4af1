"""A causal window of 256 keys beside full causal attention: time at one length, time and peak memory at several.

    python -m benchmarks.window [--length 16384] [--rounds 5]

All ways of the first table are timed in turn in one process, on the kernel that Clearhead chooses unless it is named.
The second table shows how the window's cost grows: the time of a forward pass, and the growth of the peak resident
memory of a process of its own, forward alone (with its output) and forward and backward (with its gradients).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.table import Table

import clearhead
from benchmarks.memory import growth_of_peak, in_a_process
from benchmarks.timing import console, interleaved, machine, progress

HEADS, HEAD_DIM, WINDOW = 8, 64, 256
MASK = clearhead.masks.causal() & clearhead.masks.sliding_window(WINDOW - 1, 0)
LENGTHS = (4096, 8192, 16384, 32768)
OURS, FULL = f"causal & window, {WINDOW} keys", "causal, the kernel that is chosen"


def inputs(length: int, train: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=train) for _ in range(3))
    return query, key, value


def ways(length: int) -> dict[str, Callable[[], object]]:
    query, key, value = inputs(length)
    causal = clearhead.masks.causal()

    def full_on_chunked() -> object:
        with clearhead.use_kernel("chunked"):
            return clearhead.attention(query, key, value, causal)

    return {
        OURS: lambda: clearhead.attention(query, key, value, MASK),
        FULL: lambda: clearhead.attention(query, key, value, causal),
        "causal, chunked": full_on_chunked,
        "F.scaled_dot_product_attention(is_causal=True)": lambda: F.scaled_dot_product_attention(
            query, key, value, is_causal=True
        ),
    }


def run(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], train: bool) -> None:
    output = clearhead.attention(*tensors, MASK)
    if train:
        output.sum().backward()


def peak_growth(length: int, train: bool) -> float:
    """Megabytes (10⁶ bytes) that a call needs on top of its inputs."""
    torch.manual_seed(0)
    run(inputs(512, train), train)  # libraries and thread pools are loaded once
    tensors = inputs(length, train)
    return growth_of_peak(lambda: run(tensors, train))[0]


def time_table(length: int, rounds: int) -> Table:
    with torch.no_grad():
        times = interleaved(ways(length), rounds=rounds, budget=60.0)
    table = Table(title=f"Forward, B=1 H={HEADS} L=S={length} D={HEAD_DIM}, float32, medians of {rounds}")
    for column in ("what", "milliseconds", "relative to the window"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds * 1e3:.0f}", f"{seconds / times[OURS]:.1f}")
    return table


def growth_table(lengths: tuple[int, ...]) -> Table:
    calls = {length: inputs(length) for length in lengths}
    with torch.no_grad():
        times = interleaved({str(n): lambda n=n: clearhead.attention(*calls[n], MASK) for n in lengths}, rounds=7)
    table = Table(title=f"How causal & sliding_window({WINDOW - 1}, 0) grows with the length", caption=machine())
    for column in (
        "L = S",
        "forward, ms",
        "ms per 1,000 queries",
        "peak, MB",
        "MB per 1,000",
        "peak with backward, MB",
    ):
        table.add_column(column, justify="right")
    for length in progress(lengths, "measuring memory"):
        milliseconds, peak = times[str(length)] * 1e3, in_a_process(peak_growth, length, False)
        table.add_row(
            str(length),
            f"{milliseconds:.0f}",
            f"{milliseconds / length * 1000:.1f}",
            f"{peak:.0f}",
            f"{peak / length * 1000:.2f}",
            f"{in_a_process(peak_growth, length, True):.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16384, help="L = S of the first table (default 16384)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is timed (default 5)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    console.print(time_table(arguments.length, arguments.rounds))
    console.print(growth_table(LENGTHS))


if __name__ == "__main__":
    main()
