"""Decoding: one query row beside `F.scaled_dot_product_attention`, a thousand steps of a cache, and steps of a module.

    python -m benchmarks.cpu.decoding [--only PATTERN] [--docs]

The first table times one query row of grouped heads against a full cache; all ways are timed in turn in one process.
The second runs two decodings of 1,000 tokens, one from an empty cache and one that ends at 4,096. After each step
(write the token, attend) the same cache is merely read, by summing keys and values; the steps are bound by reading the
cache where the last column does not rise along a decoding. The third decodes with a whole module and a growing
`KVCache`, token by token, beside a step written by hand: four `Linear`, two preallocated buffers, and SDPA over what
they hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.peers.by_hand import ByHand, ByHandCache
from benchmarks.timing import interleaved
from benchmarks.writing import ratio, significant, table
from clearhead.caches import KVCache

LENGTH, STEPS = 4096, 1000
#: Whole modules, E and H, and their tokens: as many are cached before, and so many are decoded.
MODULES, CACHED, DECODED = ((64, 4), (768, 12)), 512, 200
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MODULE, BY_HAND = "clearhead.MultiHeadAttention", "by hand"
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


@torch.no_grad()
def module_steps(embed_dim: int, heads: int, cached: int, count: int, rounds: int) -> dict[str, float]:
    """Seconds per token of both ways, each decoding all tokens in turn, and how much their last outputs differ."""
    torch.manual_seed(0)
    ours = clearhead.MultiHeadAttention(embed_dim, heads).eval()
    theirs = ByHand(ours).eval()
    cache = ours.make_cache(1, cached + count)
    buffers = ByHandCache(1, heads, cached + count, embed_dim // heads)
    tokens = torch.randn(cached + count, 1, 1, embed_dim)
    mask = clearhead.masks.causal()
    for token in tokens[:cached]:
        ours(token, mask=mask, cache=cache)
        theirs.step(token, buffers)
    last: dict[str, Tensor] = {}

    def decode_ours() -> None:
        for token in tokens[cached:]:
            last[MODULE] = ours(token, mask=mask, cache=cache)
        cache.crop(cached)

    def decode_by_hand() -> None:
        for token in tokens[cached:]:
            last[BY_HAND] = theirs.step(token, buffers)
        buffers.length = cached

    times = interleaved({MODULE: decode_ours, BY_HAND: decode_by_hand}, rounds=rounds, budget=15.0)
    difference = float((last[MODULE] - last[BY_HAND]).abs().max() / last[BY_HAND].abs().max())
    return {name: seconds / count for name, seconds in times.items()} | {"difference": difference}


def module_line(embed_dim: int, heads: int) -> str:
    return f"module, E={embed_dim} H={heads}, tokens {CACHED + 1} to {CACHED + DECODED}"


def lines(effort: Effort) -> list[Line]:
    length, steps = effort.size(LENGTH), effort.size(STEPS, 8)
    sizes = effort.size(CACHED, 8), effort.size(DECODED, 4)
    return [
        Line("one query row", lambda: row(effort)),
        Line("decoding from an empty cache", lambda: decoding(0, steps)),
        Line("decoding that ends at 4096", lambda: decoding(length - steps, steps)),
        *(Line(module_line(*one), lambda one=one: module_steps(*one, *sizes, effort.rounds)) for one in MODULES),
    ]


def texts(measured: Figures) -> dict[str, str]:
    """Of a part of the work, its own tables."""
    found: dict[str, str] = {}
    if one := measured.get("one query row"):
        rows = [[name, significant(time * 1e3), ratio(time / one[OURS])] for name, time in one.items()]
        found["table"] = table(("what", "ms", "relative to Clearhead (less is faster)"), rows)
        found["ratio"] = ratio(one[THEIRS] / one[OURS])
    steps = [
        [tokens, f"{step * 1e6:.0f}", f"{reading * 1e6:.0f}", f"{step / reading:.2f}" if reading else "–"]
        for name in ("decoding from an empty cache", "decoding that ends at 4096")
        for tokens, step, reading in measured.get(name, ())
    ]
    if steps:
        found["steps"] = table(("tokens in the cache", "step, µs", "reading the cache, µs", "step / reading"), steps)
    modules = [
        [name, *(significant(times[way] * 1e6) for way in (MODULE, BY_HAND)), ratio(times[BY_HAND] / times[MODULE])]
        for name, times in _module_times(measured)
    ]
    if modules:
        header = ("one token at a time", "Clearhead, µs", "by hand, µs", "ratio (above 1×: faster)")
        found["modules"] = table(header, modules)
    return found


def wrong(measured: Figures) -> list[str]:
    """Modules whose outputs differ by more than rounding."""
    return [
        f"{name}: the results differ by {times['difference']:.1e}"
        for name, times in _module_times(measured)
        if not times["difference"] <= 1e-5
    ]


def _module_times(measured: Figures) -> list[tuple[str, dict[str, float]]]:
    names = [module_line(*sizes) for sizes in MODULES]
    return [(name, measured[name]) for name in names if name in measured]


BENCHMARK = Benchmark("decoding", __doc__, lines, texts, minutes=2, rounds=101, wrong=wrong)

if __name__ == "__main__":
    BENCHMARK.main()
