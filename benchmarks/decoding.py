"""Decoding with grouped heads: one query row beside `F.scaled_dot_product_attention`, and a thousand steps of a cache.

    python -m benchmarks.decoding [--docs]

The first table times one query row against a full cache; all ways are timed in turn in one process. The second runs
two decodings of 1,000 tokens, one from an empty cache and one that ends at 4,096. After each step (write the
token, attend) the same cache is merely read, by summing keys and values; the steps are bound by reading the cache where
the last column does not rise along a decoding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.timing import interleaved
from benchmarks.writing import ratio, significant, table
from clearhead.caches import KVCache

LENGTH, STEPS = 4096, 1000
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


@torch.no_grad()
def row(effort: Effort) -> dict[str, float]:
    return interleaved(one_row(effort.size(LENGTH)), rounds=effort.rounds, budget=20.0)


@torch.no_grad()
def decoding(start: int, count: int) -> list[list[object]]:
    """Four stretches of a decoding with their medians, then how both times grow."""
    list(decode(0, min(50, count)))  # threads and memory are ready
    steps = list(decode(start, count))
    size = max(1, len(steps) // 4)
    rows: list[list[object]] = []
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        medians = [statistics.median(one) for one in zip(*((s.decoding, s.reading) for s in part), strict=True)]
        rows.append([f"{part[0].length} … {part[-1].length}", *medians])
    growths = growth(steps, lambda step: step.decoding), growth(steps, lambda step: step.reading)
    return [*rows, ["more per 1,000 tokens", *(one * 1e3 for one in growths)]]


def lines(effort: Effort) -> list[Line]:
    length, steps = effort.size(LENGTH), effort.size(STEPS, 8)
    return [
        Line("one query row", lambda: row(effort)),
        Line("decoding from an empty cache", lambda: decoding(0, steps)),
        Line("decoding that ends at 4096", lambda: decoding(length - steps, steps)),
    ]


def texts(measured: Figures) -> dict[str, str]:
    one = measured["one query row"]
    rows = [[name, significant(time * 1e3), ratio(time / one[OURS])] for name, time in one.items()]
    steps = [
        [tokens, f"{step * 1e6:.0f}", f"{reading * 1e6:.0f}", f"{step / reading:.2f}" if reading else "–"]
        for name in ("decoding from an empty cache", "decoding that ends at 4096")
        for tokens, step, reading in measured[name]
    ]
    return {
        "table": table(("what", "ms", "relative to Clearhead (less is faster)"), rows),
        "steps": table(("tokens in the cache", "step, µs", "reading the cache, µs", "step / reading"), steps),
        "ratio": ratio(one[THEIRS] / one[OURS]),
    }


BENCHMARK = Benchmark("decoding", __doc__, lines, texts, minutes=1, rounds=101)

if __name__ == "__main__":
    BENCHMARK.main()
