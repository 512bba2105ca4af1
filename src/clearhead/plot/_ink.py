"""The look that matplotlib pictures share: colours, fonts, token labels, a colour bar that prints weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._checks import shown
from ..errors import DTypeError
from ._files import whole_file
from ._labels import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# From paper white to ink, lightness falling steadily: readable in grey and with every kind of colour blindness.
RAMP = ("#ffffff", "#dbe7ee", "#a9c8d8", "#6ea3bf", "#3a7aa3", "#1d5281", "#122c55", "#0a1230")
INK, QUIET, FRAME, MARK, BAR = "#1c2430", "#6b7684", "#cfd6dd", "#d1495b", "#6ea3bf"
GAMMA = 0.5
TICKS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
NOTE = "Weights show where a head reads; they do not explain what the model decides."
MOST_LABELS = 60
LONGEST_LABEL = 16

# For scripts that matplotlib's own font lacks; the ones that are installed are used.
FALLBACK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "SimHei",
    "Arial Unicode MS",
    "Noto Sans",
    "Segoe UI",
)


def colors() -> Colormap:
    """The colour map of weights."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("clearhead", RAMP)


def fonts() -> list[str]:
    """Font families to try in turn."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]


def new_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The axes that were given, or those of a new pyplot figure of so many inches, which notebooks show."""
    if ax is not None:
        if isinstance(ax, type) or not hasattr(ax, "imshow"):
            raise DTypeError("ax", expected="axes of matplotlib", got=shown(ax))
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=size, layout="constrained")[1]


def shade(weights: Tensor, end: float = 1.0) -> Any:
    """Colour values in [0, 1]: the square root of the weight, so that faint weights stay visible."""
    return (weights.detach().float() / end).clamp(0, 1).pow(GAMMA).cpu().numpy()


def token_labels(tokens: Sequence[str]) -> list[str]:
    """Tokens as labels: printable and short."""
    return [shortened(token, LONGEST_LABEL) for token in printable(tokens)]


def label_tokens(axis: Any, labels: Sequence[str], *, turn: float, size: float = 10) -> None:
    """Write tokens along an axis, every n-th where there are too many."""
    step = -(-len(labels) // MOST_LABELS) or 1
    places = list(range(0, len(labels), step))
    axis.set_ticks(places, [labels[place] for place in places])
    families = fonts()
    for label in axis.get_ticklabels():
        label.set(rotation=turn, fontsize=size, fontfamily=families, color=INK, parse_math=False)


def plain_frame(axes: Axes) -> None:
    """Thin frame, no tick marks."""
    axes.tick_params(length=0, pad=4)
    for spine in axes.spines.values():
        spine.set_color(FRAME)


def weight_bar(figure: Any, image: AxesImage, *, end: float = 1.0, caption: str, **place: Any) -> Any:
    """A colour bar that prints weights, with its caption; `place` is for `Figure.colorbar`."""
    bar = figure.colorbar(image, **place)
    labels = [f"{tick * end:.2g}" for tick in TICKS]
    if end < 1 and image.get_array().max() >= 1:  # type: ignore[union-attr]
        labels[-1] = f"≥ {labels[-1]}"  # `scale_end` leaves a few weights out
    bar.set_ticks([tick**GAMMA for tick in TICKS], labels=labels)
    bar.ax.tick_params(length=2, labelsize=8, labelcolor=QUIET, color=QUIET)
    if place.get("orientation") == "horizontal":
        bar.ax.set_xlabel(caption, color=QUIET, fontsize=9, loc="left", linespacing=1.6)
    else:
        bar.ax.set_ylabel(caption, color=QUIET, fontsize=9)
    for spine in bar.ax.spines.values():
        spine.set_color(FRAME)
    return bar


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to a file that appears whole or not at all.

    There are no warnings about glyphs that no installed font has (they show as boxes).

    Args:
        figure: any.
        path: ends in ``.png``, ``.svg`` or ``.pdf``.
    """
    with whole_file(path) as part:
        part.write_bytes(figure_bytes(figure, path.suffix[1:].lower()))
    return path


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """A figure as the contents of a file, without warnings about glyphs that no installed font has.

    Args:
        figure: any.
        kind: ``"png"``, ``"svg"`` or ``"pdf"``.
    """
    target = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(target, dpi=150, format=kind)
    return target.getvalue()
