"""Peak memory of averaged weights: `clearhead.attention_weights` beside the (B, H, L, S) tensor.

    python -m benchmarks.seeing.weights_memory [--docs]

Each way runs in a process of its own; reported is the growth of its peak resident memory over what it had when its
inputs were ready.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.memory import growth_of_peak
from benchmarks.writing import megabytes, table

HEADS, HEAD_DIM, LENGTH = 8, 64, 8192
OURS, FULL = "clearhead.attention_weights", "softmax of the full tensor"


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
    OURS: averaged_weights,
    FULL: full_tensor,
}


def lines(effort: Effort) -> list[Line]:
    length = effort.size(LENGTH, 64)
    return [Line(name, lambda name=name: effort.in_a_process(peak_growth, name, length)) for name in WAYS]


def texts(measured: Figures) -> dict[str, str]:
    result = LENGTH * LENGTH * 4 / 1e6
    rows = [[name, f"{measured[name]:,.0f}"] for name in WAYS] + [["(the averaged map itself)", f"{result:.0f}"]]
    return {
        "table": table(("way", "peak additional memory, MB"), rows),
        "ours": megabytes(measured[OURS]),
        "result": megabytes(result),
        "full": f"{measured[FULL]:,.0f} MB",
    }


BENCHMARK = Benchmark("weights_memory", __doc__, lines, texts, minutes=0.5)

if __name__ == "__main__":
    BENCHMARK.main()
