"""Masks of blocks and of trees: the share of the tiles of scores that they show, and the share of the time they take.

    python -m benchmarks.cpu.tiles [--rounds 5] [--docs]

Both shares are those of a call without a mask. A tile is the rows and keys that the native kernel computes at once on
AVX-512, 48 × 128; a tile that the mask hides takes no arithmetic. Masks are prepared, as models call them many times.
Time is the processor's, of one thread, and the least of all rounds: other programs hardly change it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.writing import significant, table
from clearhead import masks

HEADS, HEAD_DIM, LENGTH, NODES, FEW_NODES = 8, 64, 4096, 2048, 64
ROWS, KEYS = 48, 128
NOTHING = "no mask"


def chains(count: int, length: int) -> Tensor:
    """Parents of chains of nodes that share no ancestor, one after the other."""
    parents = torch.arange(count) - 1
    parents[::length] = -1
    return parents


def visible_share(mask: masks.Mask, queries: int, keys: int) -> float:
    """The share of the tiles in which any key is visible to any query."""
    dense = F.pad(mask.dense(queries, keys)[0, 0], (0, -keys % KEYS, 0, -queries % ROWS))
    return float(dense.unflatten(0, (-1, ROWS)).unflatten(2, (-1, KEYS)).any(3).any(1).float().mean())


def blocks(length: int) -> dict[str, masks.Mask]:
    sizes = (1, 64, 256, 1024, 2048)
    per_query = (torch.arange(length) // 256 + 1) * 256
    return {
        "causal()": masks.causal(),
        **{f"block_causal({size})": masks.block_causal(size) for size in sizes},
        "lengths per query, as block_causal(256)": masks.lengths(per_query.clamp(max=length)[None]),
    }


def trees(count: int) -> dict[str, masks.Mask]:
    return {
        "one chain": masks.tree(chains(count, count)),
        "4 chains": masks.tree(chains(count, max(1, count // 4))),
        "16 chains": masks.tree(chains(count, max(1, count // 16))),
        "two children each": masks.tree((torch.arange(count) - 1).div(2, rounding_mode="floor")),
    }


def measure(chosen: dict[str, masks.Mask], queries: int, keys: int, rounds: int) -> dict[str, list[float]]:
    """Of every mask the seconds of a forward pass on one thread, and the share of the tiles that it shows."""
    query, key, value = (torch.randn(1, HEADS, length, HEAD_DIM) for length in (queries, keys, keys))
    prepared: dict[str, Any] = {name: mask.prepare(queries, keys) for name, mask in chosen.items()}
    shares = {NOTHING: 1.0, **{name: visible_share(mask, queries, keys) for name, mask in chosen.items()}}
    ways = {
        name: lambda mask=mask: clearhead.attention(query, key, value, mask)
        for name, mask in {NOTHING: None, **prepared}.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for _ in range(rounds + 1):
                for name, way in ways.items():
                    start = time.process_time()
                    way()
                    times[name].append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return {name: [min(seconds), shares[name]] for name, seconds in times.items()}


def lines(effort: Effort) -> list[Line]:
    length, count, few = effort.size(LENGTH), effort.size(NODES), effort.size(FEW_NODES)
    return [
        Line("blocks", lambda: measure(blocks(length), length, length, effort.rounds)),
        Line("trees", lambda: measure(trees(count), count, count, effort.rounds)),
        Line("trees after keys", lambda: measure(trees(few), few, few + 2 * length, effort.rounds)),
    ]


def texts(measured: Figures) -> dict[str, str]:
    header = ("mask", "ms", "tiles shown", "time", "time ÷ tiles")

    def rows(name: str) -> list[list[str]]:
        whole = measured[name][NOTHING][0]
        return [
            [mask, significant(one * 1e3), f"{share:.3f}", f"{one / whole:.3f}", f"{one / whole / share:.2f}"]
            for mask, (one, share) in measured[name].items()
        ]

    return {name.replace(" ", "-"): table(header, rows(name)) for name in ("blocks", "trees", "trees after keys")}


BENCHMARK = Benchmark("tiles", __doc__, lines, texts, minutes=1.0)

if __name__ == "__main__":
    BENCHMARK.main()
