"""The look that matplotlib pictures share: colours, fonts, token labels, a colour bar that prints weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import copysign
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._checks import shown
from ..errors import DTypeError
from ._fonts import fonts
from ._labels import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.image import AxesImage

# From paper white to ink, lightness falling steadily: readable in grey and with every kind of colour blindness.
RAMP = ("#ffffff", "#dbe7ee", "#a9c8d8", "#6ea3bf", "#3a7aa3", "#1d5281", "#122c55", "#0a1230")
# Differences, from blue (less in the second) over paper white to brown (more): lightness falls steadily to both sides,
# and blue and brown differ for every kind of sight.
CHANGES = ("#0b2f63", "#2866a8", "#74a9d6", "#c5dcef", "#ffffff", "#f8dcb8", "#e29f4e", "#ac5c10", "#5c2a02")
INK, QUIET, FRAME, MARK, BAR = "#1c2430", "#6b7684", "#cfd6dd", "#d1495b", "#6ea3bf"
GAMMA = 0.5
TICKS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
CHANGE_TICKS = (-1.0, -0.25, -0.05, 0.0, 0.05, 0.25, 1.0)
NOTE = "Weights show where a head reads; they do not explain what the model decides."
MOST_LABELS = 60
SMOOTHED = 200  # rows or columns, more than a figure has room for
LONGEST_LABEL = 16


def colors(ramp: Sequence[str] = RAMP) -> Colormap:
    """The colour map of weights, or of differences (`CHANGES`)."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("clearhead", ramp)


def new_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The given axes, or those of a new pyplot figure of this size in inches, which notebooks show."""
    if ax is not None:
        if isinstance(ax, type) or not hasattr(ax, "imshow"):
            raise DTypeError("ax", expected="axes of matplotlib", got=shown(ax))
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=size, layout="constrained")[1]


def shade(weights: Tensor, end: float = 1.0) -> Any:
    """Colour values in [−1, 1], the signed root of weights or differences. Small ones stay visible."""
    weights = weights.detach().float().cpu()
    return (weights.sign() * (weights.abs() / end).clamp(max=1).pow(GAMMA)).numpy()


def draw_weights(
    axes: Axes,
    weights: Tensor,
    tokens: tuple[Sequence[str], Sequence[str]],
    *,
    end: float,
    size: float = 10,
    **look: Any,
) -> AxesImage:
    """Draw weights between labelled tokens, queries down and keys across.

    `weights` are single ones, or tiles that cover the tokens. `end` is that of the colour scale, `size` that of the
    labels. `look` has further arguments of `imshow`.
    """
    queries, keys = tokens
    extent = (-0.5, len(keys) - 0.5, len(queries) - 0.5, -0.5)
    smooth = "nearest" if max(weights.shape) < SMOOTHED else "antialiased"
    options: dict[str, Any] = {"cmap": colors(), "vmin": 0, "vmax": 1, "interpolation": smooth} | look
    image = axes.imshow(shade(weights, end), aspect="auto", extent=extent, **options)
    axes.xaxis.tick_top()
    label_tokens(axes.xaxis, keys, turn=90, size=size)
    label_tokens(axes.yaxis, queries, turn=0, size=size)
    plain_frame(axes)
    return image


def token_labels(tokens: Sequence[str]) -> list[str]:
    """Tokens as labels: printable and short."""
    return [shortened(token, LONGEST_LABEL) for token in printable(tokens)]


def label_tokens(axis: Any, labels: Sequence[str], *, turn: float, size: float = 10) -> None:
    """Write tokens along an axis, every n-th where there are too many."""
    step = -(-len(labels) // MOST_LABELS) or 1
    places = list(range(0, len(labels), step))
    axis.set_ticks(places, [labels[place] for place in places])
    families = fonts("".join(labels))
    for label in axis.get_ticklabels():
        label.set(rotation=turn, fontsize=size, fontfamily=families, color=INK, parse_math=False)


def plain_frame(axes: Axes) -> None:
    """Thin frame, no tick marks."""
    axes.tick_params(length=0, pad=4)
    for spine in axes.spines.values():
        spine.set_color(FRAME)


def weight_bar(figure: Any, image: AxesImage, *, end: float = 1.0, caption: str, **place: Any) -> Any:
    """A colour bar that prints weights, or differences, with its caption; `place` is for `Figure.colorbar`."""
    bar = figure.colorbar(image, **place)
    if image.norm.vmin == -1:
        ticks = CHANGE_TICKS
        labels = [f"{tick * end:+.2g}".replace("-", "−") if tick else "0" for tick in ticks]
    else:
        ticks = TICKS
        labels = [f"{tick * end:.2g}" for tick in ticks]
        if end < 1 and image.get_array().max() >= 1:  # type: ignore[union-attr]
            labels[-1] = f"≥ {labels[-1]}"  # `scale_end` leaves a few weights out
    bar.set_ticks([copysign(abs(tick) ** GAMMA, tick) for tick in ticks], labels=labels)
    style_bar(bar, caption)
    return bar


def style_bar(bar: Any, caption: str) -> None:
    """Give a colour bar its caption, small labels and a thin frame."""
    bar.ax.tick_params(length=2, labelsize=8, labelcolor=QUIET, color=QUIET)
    if bar.orientation == "horizontal":
        bar.ax.set_xlabel(caption, color=QUIET, fontsize=9, loc="left", linespacing=1.6)
    else:
        bar.ax.set_ylabel(caption, color=QUIET, fontsize=9)
    bar.outline.set_edgecolor(FRAME)
