"""Pictures of results as SVG: rates over the length, and a bar chart of speed."""

from __future__ import annotations

import io
from typing import Any

from benchmarks.writing import ratio

from .results import OURS, Result

__all__ = ["COLOURS", "draw_rates", "draw_speed", "style", "svg"]

#: Okabe and Ito's colours, distinct to colour-blind readers; Clearhead has the first.
COLOURS = ("#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#999999")


def draw_rates(results: list[Result], sections: tuple[str, ...], ceilings: tuple[str, ...]) -> str:
    """GFLOP/s of every implementation over L, one panel per section, the better ceiling as a line."""
    with style():
        figure, panels = _pyplot().subplots(
            1, len(sections), figsize=(8, 4.4), sharey=True, squeeze=False, layout="constrained"
        )
        chosen = [[result for result in results if result.section == section and result.rates] for section in sections]
        names = list(dict.fromkeys(name for part in chosen for result in part for name in result.rates))
        colours = dict(zip([name for name in names if name not in ceilings], COLOURS, strict=False))
        for axes, section, part in zip(panels[0], sections, chosen, strict=True):
            _panel(axes, part, colours, ceilings)
            axes.set_title(section, fontsize=11)
        panels[0][0].set_ylabel("GFLOP/s")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10, frameon=False)
        return svg(figure)


def _panel(axes: Any, part: list[Result], colours: dict[str, str], ceilings: tuple[str, ...]) -> None:
    lengths = [int(result.name.removeprefix("L=")) for result in part]
    for name, colour in colours.items():
        points = [(at, result.rates[name]) for at, result in zip(lengths, part, strict=True) if name in result.rates]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name, lw=2.5 if name == OURS else 1.2)
    best = [max((result.rates[name] for name in ceilings if name in result.rates), default=None) for result in part]
    if part and None not in best:
        axes.plot(lengths, best, "--", color="0.4", label="matrix product")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens L = S")
    axes.grid(visible=True, color="0.92")


def draw_speed(speeds: dict[str, float], label: str) -> str:
    """One bar for each piece of work, as long as Clearhead is fast beside PyTorch, with its figure."""
    with style():
        figure, axes = _pyplot().subplots(figsize=(8, 0.6 + 0.36 * len(speeds)), layout="constrained")
        places = range(len(speeds), 0, -1)
        colours = [COLOURS[0] if speed >= 1 else COLOURS[2] for speed in speeds.values()]
        axes.barh(places, list(speeds.values()), color=colours, height=0.66, zorder=2)
        for place, speed in zip(places, speeds.values(), strict=True):
            axes.annotate(ratio(speed), (speed, place), (4, 0), textcoords="offset points", va="center")
        axes.axvline(1, color="0.2", lw=1.2, zorder=3)
        axes.set_yticks(places, list(speeds))
        axes.set_xlim(0, 1.12 * max(speeds.values()))
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="x", color="0.9")
        return svg(figure)


def svg(figure: Any) -> str:
    """The same text for the same figure, whenever it is drawn; texts stay texts."""
    with style():
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    _pyplot().close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def style() -> Any:
    """Legible where a page shows it 800 pixels wide."""
    import matplotlib

    matplotlib.use("Agg")
    options = {"svg.hashsalt": "clearhead", "svg.fonttype": "none", "font.size": 11, "figure.facecolor": "white"}
    return matplotlib.rc_context(options)


def _pyplot() -> Any:
    from matplotlib import pyplot

    return pyplot
