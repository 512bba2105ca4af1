"""Two pictures of the results: rates over the length, and speeds relative to PyTorch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .results import OURS, Result

__all__ = ["draw_rates", "draw_ratios"]

#: Okabe and Ito's colours, distinct to colour-blind readers; Clearhead has the first.
COLOURS = ("#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#999999")


def draw_rates(results: list[Result], sections: tuple[str, ...], ceilings: tuple[str, ...], path: Path) -> None:
    """GFLOP/s of every implementation over L, one panel per section, the better ceiling as a line."""
    plt = _pyplot()
    chosen = [[result for result in results if result.section == section and result.rates] for section in sections]
    figure, panels = plt.subplots(
        1, len(sections), figsize=(5.2 * len(sections), 4.2), dpi=120, sharey=True, squeeze=False
    )
    names = list(dict.fromkeys(name for part in chosen for result in part for name in result.rates))
    colours = dict(zip([name for name in names if name not in ceilings], COLOURS, strict=False))
    for axes, section, part in zip(panels[0], sections, chosen, strict=True):
        lengths = [int(result.name.removeprefix("L=")) for result in part]
        for name, colour in colours.items():
            points = [
                (at, result.rates[name]) for at, result in zip(lengths, part, strict=True) if name in result.rates
            ]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name, lw=2.5 if name == OURS else 1.2)
        best = [max((result.rates[name] for name in ceilings if name in result.rates), default=None) for result in part]
        if part and None not in best:
            axes.plot(lengths, best, "--", color="0.4", label="matrix product (ceiling)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_ylim(bottom=0)
        axes.set_title(section, fontsize=10)
        axes.set_xlabel("tokens L = S")
        axes.grid(visible=True, color="0.92")
    panels[0][0].set_ylabel("GFLOP/s")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, fontsize=8, frameon=False)
    _save(figure, path)


def draw_ratios(results: list[Result], references: tuple[str, ...], path: Path) -> None:
    """Speed relative to PyTorch's on a logarithmic axis: one row per piece of work, one mark per implementation.

    Args:
        results: those in milliseconds are drawn.
        references: PyTorch's ways; of each result the first that was measured counts as 1.
        path: of the picture.
    """
    plt = _pyplot()
    rows = []
    for result in results:
        reference = next((result.figures[name] for name in references if name in result.figures), None)
        if reference is not None and result.unit == "ms":
            names = [name for name in (*result.ratios, OURS) if _is_drawn(name, references)]
            rows.append((result, {name: reference / result.figures[name] for name in names}))
    names = list(dict.fromkeys([OURS, *(name for _, speeds in rows for name in speeds)]))
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.22 * len(rows)), dpi=120)
    for name, colour in zip(names, COLOURS, strict=False):
        points = [(speeds[name], len(rows) - at) for at, (_, speeds) in enumerate(rows) if name in speeds]
        size, order = (42, 3) if name == OURS else (16, 2)
        axes.scatter(*zip(*points, strict=True), s=size, color=colour, label=name, zorder=order)
    axes.axvline(1, color="0.3", lw=1)
    labels = [f"{result.section}, {result.name}" for result, _ in reversed(rows)]
    axes.set_yticks(range(1, len(rows) + 1), labels, fontsize=7)
    axes.set_xscale("log", base=2)
    ticks = (0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("speed relative to PyTorch (1: as fast; right of it: faster)")
    axes.set_ylim(0.3, len(rows) + 0.7)
    axes.grid(visible=True, color="0.93")
    axes.set_axisbelow(True)
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=4, fontsize=8, frameon=False)
    _save(figure, path)


def _is_drawn(name: str, references: tuple[str, ...]) -> bool:
    """Variants of Clearhead's own ("Clearhead, …", "Clearhead without …") are in the tables only."""
    return name == OURS or (name not in references and not name.startswith((f"{OURS},", f"{OURS} without")))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
