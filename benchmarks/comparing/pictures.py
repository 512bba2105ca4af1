"""Two pictures of the results: rates over the length, and how much of every bar is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .bars import OURS
from .results import Result

__all__ = ["draw_bars", "draw_rates"]

#: Okabe and Ito's colours, which the colour-blind can tell apart; ours is always the first.
COLOURS = ("#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#999999")
MET, MISSED = "#0072b2", "#d55e00"


def draw_rates(results: list[Result], sections: tuple[str, ...], ceilings: tuple[str, ...], path: Path) -> None:
    """GFLOP/s of everybody over L, one panel per section, the better ceiling as a line."""
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


def draw_bars(results: list[Result], path: Path) -> None:
    """What is measured as a share of every bar; right of 1 it is met."""
    plt = _pyplot()
    lines = [
        (f"{result.section}, {result.name}: {verdict.bar}", verdict.reached)
        for result in results
        for verdict in result.verdicts
        if verdict.reached is not None
    ]
    figure, axes = plt.subplots(figsize=(10, 1 + 0.22 * len(lines)), dpi=120)
    for place, (_, reached) in enumerate(reversed(lines)):
        axes.plot([1, reached], [place, place], color="0.8", lw=1.5, zorder=1)
        axes.plot(reached, place, "o", color=MET if reached >= 1 else MISSED, zorder=2)
    axes.axvline(1, color="0.3", lw=1)
    axes.set_yticks(range(len(lines)), [text for text, _ in reversed(lines)], fontsize=7)
    axes.set_xscale("log", base=2)
    ticks = (0.125, 0.25, 0.5, 0.8, 1, 1.25, 2, 4)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("measured ÷ bar")
    axes.set_ylim(-0.7, len(lines) - 0.3)
    axes.grid(visible=True, axis="x", color="0.93")
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
