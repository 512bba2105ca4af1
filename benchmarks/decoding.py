"""Decoding with grouped heads: one query row beside `F.scaled_dot_product_attention`, and a thousand steps of a cache.

    python -m benchmarks.decoding [--length 4096] [--steps 1000]

The first table times one query row against a full cache; all ways are timed in turn in one process. The second runs
two decodings of `--steps` tokens, one from an empty cache and one that ends at `--length`. After each step (write the
token, attend) the same cache is merely read, by summing keys and values; the steps are bound by reading the cache where
the last column does not rise along a decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.table import Table

import clearhead
from benchmarks.timing import console, interleaved, machine, progress
from clearhead.caches import KVCache

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
OURS, THEIRS, READING = (
    "clearhead.attention",
    "F.scaled_dot_product_attention(enable_gqa=True)",
    "reading the cache (sum)",
)


@dataclass(frozen=True)
class Step:
    """One token: how long the cache was, and seconds for the step and for reading the cache."""

    length: int
    decoding: float
    reading: float


def one_row(length: int) -> dict[str, Callable[[], object]]:
    query = torch.randn(1, HEADS, 1, HEAD_DIM)
    key, value = (torch.randn(1, KV_HEADS, length, HEAD_DIM) for _ in range(2))
    mask = clearhead.masks.causal()
    return {
        OURS: lambda: clearhead.attention(query, key, value, mask, query_positions=length - 1),
        THEIRS: lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        READING: lambda: (key.sum(), value.sum()),
    }


def decode(start: int, count: int) -> Iterator[Step]:
    """Feed tokens one by one into a cache that already holds `start` of them."""
    cache = KVCache(1, KV_HEADS, start + count, HEAD_DIM)
    if start:
        cache.update(*(torch.randn(1, KV_HEADS, start, HEAD_DIM) for _ in range(2)))
    mask = clearhead.masks.causal()
    for length in range(start + 1, start + count + 1):
        query = torch.randn(1, HEADS, 1, HEAD_DIM)
        key, value = (torch.randn(1, KV_HEADS, 1, HEAD_DIM) for _ in range(2))
        began = time.perf_counter()
        found = cache.update(key, value)
        clearhead.attention(query, found.key, found.value, mask, query_positions=length - 1)
        decoded = time.perf_counter()
        cache.key.sum(), cache.value.sum()
        yield Step(length, decoded - began, time.perf_counter() - decoded)


def growth(steps: list[Step], seconds: Callable[[Step], float]) -> float:
    """Seconds per token of cache length: the median slope between steps half a decoding apart (Theil and Sen)."""
    half = len(steps) // 2
    pairs = zip(steps[:half], steps[half:], strict=False)
    return statistics.median((seconds(late) - seconds(early)) / (late.length - early.length) for early, late in pairs)


def row_table(length: int) -> Table:
    times = interleaved(one_row(length), rounds=101, budget=20.0)
    table = Table(title=f"One query row, B=1 H={HEADS} Hkv={KV_HEADS} S={length} D={HEAD_DIM}, float32")
    for column in ("what", "milliseconds (median)", "relative to Clearhead"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds * 1e3:.3f}", f"{seconds / times[OURS]:.2f}")
    return table


def add_decoding(table: Table, steps: list[Step]) -> None:
    """Four stretches of a decoding with their medians, then how both times grow."""
    size = max(1, len(steps) // 4)
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        decoding, reading = (
            statistics.median(seconds) for seconds in zip(*((s.decoding, s.reading) for s in part), strict=True)
        )
        table.add_row(
            f"{part[0].length} … {part[-1].length}",
            f"{decoding * 1e6:.0f}",
            f"{reading * 1e6:.0f}",
            f"{decoding / reading:.2f}",
        )
    decoding, reading = growth(steps, lambda step: step.decoding), growth(steps, lambda step: step.reading)
    table.add_row("growth per 1,000", f"{decoding * 1e9:.0f}", f"{reading * 1e9:.0f}", f"{decoding / reading:.2f}")
    table.add_section()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="S, and where the second decoding ends (default 4096)")
    parser.add_argument("--steps", type=int, default=1000, help="tokens of each decoding (default 1000)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    console.print(row_table(arguments.length))
    table = Table(title=f"{arguments.steps} steps, microseconds per token (medians)", caption=machine())
    for column in ("tokens in the cache", "step", "reading the cache", "step / reading"):
        table.add_column(column, justify="right")
    list(decode(0, 50))  # threads and memory are ready
    for start in (0, max(0, arguments.length - arguments.steps)):
        steps = [
            step
            for step, _ in zip(
                decode(start, arguments.steps), progress(range(arguments.steps), "decoding"), strict=True
            )
        ]
        add_decoding(table, steps)
    console.print(table)


if __name__ == "__main__":
    main()
