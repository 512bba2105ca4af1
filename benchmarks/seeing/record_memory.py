"""Peak memory of recording entropy, received, max_logit and top-8, from 1k to 64k tokens, beside `need_weights=True`.

    python -m benchmarks.seeing.record_memory [--docs]

Every point runs in a process of its own: first the model alone, then the model with its record (or with its weights).
Reported is how far the second run raises the peak resident memory of the process over that of the first, in megabytes
(10⁶ bytes), the statistics themselves included. `attention_statistics` stands beside it without any model, so that
nothing it needs can hide in memory that a model had and gave back. `nn.MultiheadAttention(need_weights=True)` runs as
long as its (B, H, L, S) tensors fit into the memory that is free. The curve is written to
docs/images/record-memory.svg.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing.pictures import COLOURS, style, svg
from benchmarks.figures import ROOT, Figures
from benchmarks.memory import growth_of_peak
from benchmarks.writing import megabytes, table

BATCH, HEADS, HEAD_DIM = 1, 8, 64
STATISTICS = ("entropy", "received", "max_logit", "top_k")
RECORD, STATISTICS_ALONE = "clearhead.record", "clearhead.attention_statistics"
WEIGHTS = "nn.MultiheadAttention, need_weights=True"
PICTURE = ROOT / "docs" / "images" / "record-memory.svg"
LENGTHS = [1024 * 2**power for power in range(7)]


class Attend(torch.nn.Module):
    """Somebody's model: one attention and nothing else."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)


Run = Callable[[], object]


def record(length: int) -> tuple[Run, Run]:
    query, key, value = (torch.randn(BATCH, HEADS, length, HEAD_DIM) for _ in range(3))
    model = Attend()

    def recorded() -> object:
        with clearhead.record(model, STATISTICS, top_k=8) as rec:
            output = model(query, key, value)
        return rec, output

    return lambda: model(query, key, value), recorded


def statistics_alone(length: int) -> tuple[Run, Run]:
    query, key = (torch.randn(BATCH, HEADS, length, HEAD_DIM) for _ in range(2))
    return lambda: None, lambda: clearhead.attention_statistics(query, key, statistics=STATISTICS, top_k=8)


def need_weights(length: int) -> tuple[Run, Run]:
    model = torch.nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True)
    x = torch.randn(BATCH, length, HEADS * HEAD_DIM)
    # In training without weights PyTorch runs its fused kernel; with weights its eval mode needs the least memory.
    return (
        lambda: model.train()(x, x, x, need_weights=False),
        lambda: model.eval()(x, x, x, need_weights=True, average_attn_weights=False),
    )


#: The model alone and with what is measured, for a length.
WAYS: dict[str, Callable[[int], tuple[Run, Run]]] = {
    RECORD: record,
    STATISTICS_ALONE: statistics_alone,
    WEIGHTS: need_weights,
}


def peak_growth(name: str, length: int) -> tuple[float, float]:
    """Megabytes that recording needs on top of the model, and the seconds of both together."""
    torch.manual_seed(0)
    with torch.no_grad():
        for warm_up in WAYS[name](64):  # libraries and thread pools are loaded once
            warm_up()
        alone, measured = WAYS[name](length)
        alone()
        start = time.perf_counter()
        growth, _ = growth_of_peak(measured)
        return growth, time.perf_counter() - start


def whole_tensor(length: int) -> float:
    """Megabytes of one (B, H, L, S) tensor of float32."""
    return BATCH * HEADS * length * length * 4 / 1e6


def fits(length: int) -> bool:
    """Whether the scores and their softmax fit into what is free, with a fifth to spare."""
    with open("/proc/meminfo", encoding="utf-8") as info:
        free = next(int(line.split()[1]) for line in info if line.startswith("MemAvailable")) * 1024 / 1e6
    return 2.5 * whole_tensor(length) < free


def lines(effort: Effort) -> list[Line]:
    def measure(name: str, length: int) -> list[float] | None:
        """Megabytes and seconds; nothing where the weights do not fit."""
        if name == WEIGHTS and not fits(length):
            return None
        return list(effort.in_a_process(peak_growth, name, effort.size(length)))

    return [
        Line(f"{name}: {length}", lambda name=name, length=length: measure(name, length))
        for length in LENGTHS
        for name in WAYS
    ]


def texts(measured: Figures) -> dict[str, str]:
    rows: list[list[str]] = []
    for length in LENGTHS:
        recorded, alone, weights = (measured[f"{name}: {length}"] for name in (RECORD, STATISTICS_ALONE, WEIGHTS))
        needed = "does not fit" if weights is None else f"{weights[0]:,.0f}"
        rows.append(
            [
                f"{length:,}",
                f"{recorded[0]:.0f}",
                f"{alone[0]:.0f}",
                f"{recorded[1]:.1f}",
                needed,
                f"{whole_tensor(length):,.0f}",
            ]
        )
    header = ("L", "record, MB", "statistics alone, MB", "record, s", "need_weights, MB", "one (B, H, L, S) tensor, MB")
    return {
        "table": table(header, rows, left=0),
        "statistics": megabytes(measured[f"{RECORD}: {LENGTHS[-1]}"][0]),
        "weights": megabytes(whole_tensor(LENGTHS[-1])),
    }


def pictures(measured: Figures) -> dict[Path, str]:
    from matplotlib import pyplot as plt

    with style():
        figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
        for name, marks, colour in zip(WAYS, ("o-", "^--", "s-"), (COLOURS[0], COLOURS[3], COLOURS[1]), strict=True):
            points = {length: measured[f"{name}: {length}"] for length in LENGTHS}
            fitting = {length: found[0] for length, found in points.items() if found is not None}
            axes.plot(list(fitting), list(fitting.values()), marks, color=colour, label=name)
        whole = [whole_tensor(length) for length in LENGTHS]
        axes.plot(LENGTHS, whole, ":", color="0.5", label="one (B, H, L, S) tensor of float32")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
        axes.set_xlabel("tokens L = S")
        axes.set_ylabel("peak additional memory, MB")
        axes.set_title(f"Entropy, received mass, largest logit and top-8 of {HEADS} heads", fontsize=11)
        axes.grid(visible=True, which="major", color="0.9")
        axes.legend()
        return {PICTURE: svg(figure)}


BENCHMARK = Benchmark("record_memory", __doc__, lines, texts, minutes=3)

if __name__ == "__main__":
    BENCHMARK.main()
