"""Peak memory of recording entropy, received, max_logit and top-8, from 1k to 64k tokens, beside `need_weights=True`.

    python -m benchmarks.record_memory [--longest 65536] [--no-plot]

Every point runs in a process of its own: first the model alone, then the model with its record (or with its weights).
Reported is how far the second run raises the peak resident memory of the process over that of the first, in megabytes
(10⁶ bytes), the statistics themselves included. `attention_statistics` stands beside it without any model, so that
nothing it needs can hide in memory that a model had and gave back. `nn.MultiheadAttention(need_weights=True)` runs as
long as its (B, H, L, S) tensors fit into the memory that is free. The curve is written to
docs/images/record-memory.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table

import clearhead
from benchmarks.memory import growth_of_peak, in_a_process
from benchmarks.timing import console, machine, progress

BATCH, HEADS, HEAD_DIM = 1, 8, 64
STATISTICS = ("entropy", "received", "max_logit", "top_k")
RECORD, STATISTICS_ALONE = "clearhead.record", "clearhead.attention_statistics"
WEIGHTS = "nn.MultiheadAttention, need_weights=True"
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "record-memory.png"
Points = dict[str, dict[int, float]]


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


def measure(lengths: list[int]) -> tuple[Points, dict[int, float]]:
    points: Points = {name: {} for name in WAYS}
    times: dict[int, float] = {}
    jobs = [(name, length) for length in lengths for name in WAYS if name != WEIGHTS or fits(length)]
    for name, length in progress(jobs, "measuring"):
        points[name][length], seconds = in_a_process(peak_growth, name, length)
        if name == RECORD:
            times[length] = seconds
    return points, times


def show(points: Points, times: dict[int, float]) -> None:
    table = Table(
        title=f"Peak additional memory, MB; B={BATCH} H={HEADS} L=S D={HEAD_DIM}, float32, top-8", caption=machine()
    )
    for column in ("L", "record", "statistics alone", "seconds", "need_weights", "one (B, H, L, S) tensor"):
        table.add_column(column, justify="right")
    for length, megabytes in points[RECORD].items():
        other = points[WEIGHTS].get(length)
        table.add_row(
            str(length),
            f"{megabytes:.0f}",
            f"{points[STATISTICS_ALONE][length]:.0f}",
            f"{times[length]:.1f}",
            "does not fit" if other is None else f"{other:.0f}",
            f"{whole_tensor(length):.0f}",
        )
    console.print(table)


def draw(points: Points, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.4), dpi=120, layout="constrained")
    lengths = list(points[RECORD])
    axes.plot(lengths, list(points[RECORD].values()), "o-", color="#0072b2", label=RECORD)
    axes.plot(lengths, list(points[STATISTICS_ALONE].values()), "^--", color="#009e73", label=STATISTICS_ALONE)
    axes.plot(list(points[WEIGHTS]), list(points[WEIGHTS].values()), "s-", color="#d55e00", label=WEIGHTS)
    whole = [whole_tensor(length) for length in lengths]
    axes.plot(lengths, whole, ":", color="0.5", label="one (B, H, L, S) tensor of float32")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.set_xlabel("tokens L = S")
    axes.set_ylabel("peak additional memory, MB")
    title = f"Entropy, received mass, largest logit and top-8 of every head (B={BATCH}, H={HEADS}, D={HEAD_DIM})"
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="major", color="0.9")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    console.print(f"curve: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=65536, help="largest L (default 65536, which takes minutes)")
    parser.add_argument("--no-plot", action="store_true", help="print the table only")
    arguments = parser.parse_args()
    lengths = [1024 * 2**power for power in range(7) if 1024 * 2**power <= arguments.longest]
    points, times = measure(lengths)
    show(points, times)
    if not arguments.no_plot:
        draw(points, PICTURE)


if __name__ == "__main__":
    main()
