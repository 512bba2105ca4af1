"""Time of four statistics: attention with entropy, received, max_logit and top-8 beside attention alone.

    python -m benchmarks.seeing.record_time [--rounds 7] [--docs]

All ways are timed in turn in one process. The last column is the time relative to PyTorch's
`F.scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.timing import interleaved
from benchmarks.writing import ratio, significant, table

BATCH, HEADS, HEAD_DIM = 1, 8, 64
STATISTICS = ("entropy", "received", "max_logit", "top_k")
LENGTH = 4096
RECORDED = "attention and the four statistics (record)"
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
        RECORDED: recorded,
        "attention_statistics: all four": lambda: clearhead.attention_statistics(
            query, key, statistics=STATISTICS, top_k=8
        ),
        **statistics,
    }


@torch.no_grad()
def times(effort: Effort) -> dict[str, float]:
    return interleaved(ways(effort.size(LENGTH)), rounds=effort.rounds, budget=120.0)


def lines(effort: Effort) -> list[Line]:
    return [Line("L=4096", lambda: times(effort))]


def texts(measured: Figures) -> dict[str, str]:
    found = measured["L=4096"]
    rows = [[name, significant(one * 1e3), ratio(one / found[SDPA])] for name, one in found.items()]
    return {
        "table": table(("what", "ms", "relative to SDPA (less is faster)"), rows),
        "ratio": ratio(found[RECORDED] / found[SDPA]),
        "own-ratio": ratio(found[RECORDED] / found["clearhead.attention"]),
    }


BENCHMARK = Benchmark("record_time", __doc__, lines, texts, minutes=0.5, rounds=7)

if __name__ == "__main__":
    BENCHMARK.main()
