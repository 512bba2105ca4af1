"""A causal window of 256 keys beside full causal attention: time at one length, time and peak memory at several.

    python -m benchmarks.cpu.window [--rounds 5] [--docs]

All ways of the first table are timed in turn in one process, on the kernel that Clearhead chooses unless it is named.
The second table shows how the window's cost grows: the time of a forward pass, and the growth of the peak resident
memory of a process of its own, forward alone (with its output) and forward and backward (with its gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing.pictures import draw_speed
from benchmarks.figures import ROOT, Figures
from benchmarks.memory import growth_of_peak
from benchmarks.timing import interleaved
from benchmarks.writing import milliseconds, ratio, significant, table

HEADS, HEAD_DIM, WINDOW = 8, 64, 256
MASK = clearhead.masks.causal() & clearhead.masks.sliding_window(WINDOW - 1, 0)
LENGTHS = (4096, 8192, 16384, 32768)
LENGTH = 16384
OURS, FULL = f"causal & window, {WINDOW} keys", "causal, the kernel that is chosen"
SDPA = "F.scaled_dot_product_attention(is_causal=True)"
PICTURE = ROOT / "docs" / "images" / "window.svg"


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
        SDPA: lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
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


def times(effort: Effort) -> dict[str, float]:
    with torch.no_grad():
        return interleaved(ways(effort.size(LENGTH)), rounds=effort.rounds, budget=60.0)


def growing_times(effort: Effort) -> dict[str, float]:
    calls = {length: inputs(effort.size(length)) for length in LENGTHS}
    with torch.no_grad():
        return interleaved({str(n): lambda n=n: clearhead.attention(*calls[n], MASK) for n in LENGTHS}, rounds=7)


def memory(effort: Effort) -> dict[str, list[float]]:
    """Of a forward pass, and of forward and backward."""
    return {
        str(length): [effort.in_a_process(peak_growth, effort.size(length), train) for train in (False, True)]
        for length in LENGTHS
    }


def lines(effort: Effort) -> list[Line]:
    return [
        Line("forward", lambda: times(effort)),
        Line("growth of the time", lambda: growing_times(effort)),
        Line("growth of the memory", lambda: memory(effort)),
    ]


def texts(measured: Figures) -> dict[str, str]:
    forward, peaks = measured["forward"], measured["growth of the memory"]
    rows = [[name, significant(one * 1e3), ratio(one / forward[OURS])] for name, one in forward.items()]
    growth = [
        [
            f"{int(length):,}",
            significant(one * 1e3),
            significant(one * 1e6 / int(length)),
            *(f"{peak:.0f}" for peak in peaks[length]),
            significant(peaks[length][0] / int(length) * 1e3),
        ]
        for length, one in measured["growth of the time"].items()
    ]
    header = ("L = S", "forward, ms", "per 1,000 queries, ms", "peak, MB", "with backward, MB", "per 1,000 queries, MB")
    return {
        "table": table(("what", "ms", "relative to the window (less is faster)"), rows),
        "growth": table(header, growth, left=0),
        "ours": milliseconds(forward[OURS]),
        "full": milliseconds(forward[FULL]),
        "sdpa": milliseconds(forward[SDPA]),
        "ratio": ratio(forward[SDPA] / forward[OURS]),
        "full-ratio": ratio(forward[FULL] / forward[OURS]),
    }


def pictures(measured: Figures) -> dict[Path, str]:
    """How much faster the window is than what computes every key."""
    forward = measured["forward"]
    others = {"full causal attention": FULL, "SDPA, causal": SDPA}
    speeds = {f"a window of 256 keys beside {name}": forward[other] / forward[OURS] for name, other in others.items()}
    return {PICTURE: draw_speed(speeds, "speed, 16,384 tokens (1: as fast; longer: faster)")}


BENCHMARK = Benchmark("window", __doc__, lines, texts, minutes=1.5)

if __name__ == "__main__":
    BENCHMARK.main()
