"""matplotlib pictures of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._checks import shown
from ..errors import ArgumentError
from ._collect import SectionPicture
from ._compared_records import ComparedRecords
from ._fonts import fonts
from ._head_grid import draw_heads, head_cells, plot_head_table
from ._ink import CHANGES, INK, NOTE, QUIET, colors, draw_weights, token_labels, weight_bar
from ._labels import layer_labels, shortened
from ._language import say
from ._scale import scale_end

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def name_of(by: str) -> str:
    """The score that `ComparedRecords.by` names, in words."""
    return say("Jensen–Shannon divergence") if by == "divergence" else say("change of {0}", by)


def plot_comparison(comparison: ComparedRecords, statistic: str | None, ax: Axes | None) -> Axes:
    """See `Comparison.plot_heads`."""
    if statistic is not None and (not isinstance(statistic, str) or statistic not in comparison.differences):
        known = ", ".join(comparison.differences) or "none"
        raise ArgumentError("statistic", expected=f"one that both records have, {known}", got=shown(statistic))
    values = comparison.scores() if statistic is None else comparison.differences[statistic]
    heads = [comparison.heads[name] for name in values]
    if statistic is not None:
        end = max(float(each.abs().nan_to_num(0).max()) for each in head_cells(list(values.values()))) or 1.0
        title = say("{0}, second − first", statistic)
        return plot_head_table(values, title, cmap=colors(CHANGES), heads=heads, low=-end, high=end, ax=ax)
    unit = say("nats") if comparison.by == "divergence" else ""
    return plot_head_table(values, name_of(comparison.by), cmap=colors(), heads=heads, low=0, unit=unit, ax=ax)


def draw_comparison(
    pictures: Sequence[SectionPicture],
    place: tuple[int, int],
    scores: Sequence[Sequence[float]],
    *,
    labels: Sequence[str],
    by: str,
    note: str,
) -> Figure:
    """Draw one head of both and the difference beside each other, above one number per head.

    Args:
        pictures: of the first and the second, and of their difference if weights are compared.
        place: places of the large layer and head in the pictures.
        scores: layer → head → difference.
        labels: the names of both.
        by, note: as in the comparison.
    """
    from matplotlib.figure import Figure

    layer, head = place
    layers = [picture.layers[layer] for picture in pictures]
    weights = [each.head_map(head) for each in layers]
    texts = [(token_labels(picture.queries.names), token_labels(picture.keys.names)) for picture in pictures]
    longest = max(len(names) for pair in texts for names in pair)
    side = min(max(0.27 * longest, 2.4), 6.5)
    low = 0.26 * len(scores) + 0.7
    size = ((side + 1.6) * len(pictures) + 0.6, side + low + 3.4)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(side + 2.4, low))
    upper, lower = parts
    end = scale_end(weights[:2])
    axes = upper.subplots(1, len(pictures), squeeze=False)[0]
    for number, (each, shown_weights, tokens) in enumerate(zip(axes, weights, texts, strict=True)):
        changed = number == 2
        last = scale_end([shown_weights.abs()]) if changed else end
        look: dict[str, Any] = {"cmap": colors(CHANGES), "vmin": -1} if changed else {}
        image = draw_weights(each, shown_weights, tokens, end=last, size=9, **look)
        which = say("second") if number else say("first")
        name = say("second − first") if changed else _wrapped(f"{which}: {labels[number]}", side)
        each.set_xlabel(name, color=INK, fontsize=10, fontfamily=fonts(name), parse_math=False)
        caption = say("change of a weight") if changed else say("weight of a key in its query's row")
        place_of_bar = {"ax": each, "orientation": "horizontal", "shrink": 0.9, "aspect": 40, "pad": 0.02}
        weight_bar(upper, image, end=last, caption=caption, **place_of_bar)
    layer_names = layer_labels([each.name for each in pictures[0].layers])
    upper.suptitle(
        say("layer {0}, head {1}", layer_names[layer], layers[0].heads[head]), x=0.01, ha="left", color=INK, fontsize=12
    )
    _draw_scores(lower, scores, layer_names, place, name_of(by))
    figure.supxlabel(f"{note}\n{say(NOTE)}", x=0.01, ha="left", color=QUIET, fontsize=9)
    return figure


def _wrapped(text: str, inches: float) -> str:
    """A label on at most three lines that fit below axes of that width."""
    from rich.console import Console
    from rich.text import Text

    lines = Text(shortened(text, 200)).wrap(Console(), max(16, round(11 * inches)))
    return "\n".join(line.plain for line in lines[:3])


def _draw_scores(
    figure: Any, scores: Sequence[Sequence[float]], labels: Sequence[str], place: tuple[int, int], name: str
) -> None:
    axes = figure.subplots()
    cells = head_cells([torch.tensor(row) for row in scores])
    end = max(float(each.nan_to_num(0).max()) for each in cells) or 1.0
    written = [[f"{value:.3f}" for value in row] for row in scores]
    look: dict[str, Any] = {"cmap": colors(), "vmin": 0, "vmax": end * 1.25, "aspect": "auto"}
    draw_heads(axes, cells, labels, gap=0, empty=float("nan"), chosen=place, written=written, **look)
    axes.set_title(say("{0} of every head", name), loc="left", fontsize=9, color=QUIET)
