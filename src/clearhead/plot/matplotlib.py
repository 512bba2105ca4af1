"""All heads of a model in one matplotlib figure: the chosen one large, the others as thumbnails."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .heads import require_head, require_weights
from .labels import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = ["draw_heads", "save_figure"]

# From paper white to ink, lightness falling steadily: readable in grey and with every kind of colour blindness.
RAMP = ("#ffffff", "#dbe7ee", "#a9c8d8", "#6ea3bf", "#3a7aa3", "#1d5281", "#122c55", "#0a1230")
INK, QUIET, FRAME, MARK = "#1c2430", "#6b7684", "#cfd6dd", "#d1495b"
GAMMA = 0.5
BAR_TICKS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
NOTE = (
    "weight of a key in its query's row\nWeights show where a head reads; they do not explain what the model decides."
)

# Inches.
MARGIN, TITLE, THUMBNAILS_WIDTH = 0.35, 0.55, 6.4
THUMBNAIL_PIXELS, GAP = 48, 0.14

# For scripts that matplotlib's own font lacks; the first ones that are installed are used.
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


def draw_heads(
    weights: Sequence[Tensor],
    tokens: Sequence[str],
    layer: int,
    head: int,
    *,
    key_tokens: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw one head large, tokens on both axes, beside thumbnails of all heads.

    Colour stands for the square root of the weight, so that faint weights stay visible; the colour bar is labelled
    with weights. No global matplotlib state is touched: no backend is chosen, no setting changed.

    Args:
        weights: one (H, L, S) tensor per layer.
        tokens: L query tokens.
        layer, head: which head is large, counted from 0.
        key_tokens: S key tokens. Default: the query tokens.
        title: a line above. Default: none.

    Raises:
        ArgumentError: if there is no such layer or head.
        ShapeError: if weights and tokens do not fit.

    Example:
        >>> figure = draw_heads([torch.eye(3).repeat(2, 1, 1)], ["a", "b", "c"], layer=0, head=1)
        >>> len(figure.axes)
        3
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    keys = tokens if key_tokens is None else key_tokens
    require_weights(weights, tokens, keys)
    require_head(weights, layer, head)
    queries, keys = _labels(tokens), _labels(keys)
    colors = LinearSegmentedColormap.from_list("clearhead", RAMP)
    fonts = _fonts()
    page = _Page(queries, keys, weights)
    figure = Figure(figsize=page.size, facecolor="white")
    image = _draw_large(figure.add_axes(page.large), weights[layer][head], queries, keys, colors, fonts)
    _draw_thumbnails(figure.add_axes(page.thumbnails), weights, (layer, head), colors)
    _draw_color_bar(figure, figure.add_axes(page.color_bar), image)
    x, y = page.heading
    heading = f"layer {layer}, head {head}" if title is None else f"{_cut(title, 90)}   ·   layer {layer}, head {head}"
    figure.text(x, y, heading, color=INK, fontsize=12, fontfamily=fonts, parse_math=False)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to a file, and say nothing about glyphs that no installed font has (they show as boxes).

    Args:
        figure: from `draw_heads`.
        path: ends in ``.png``, ``.svg`` or ``.pdf``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path, dpi=150)
    return path


class _Page:
    """Where the parts of the figure lie, as matplotlib's (left, bottom, width, height) fractions."""

    def __init__(self, queries: list[str], keys: list[str], weights: Sequence[Tensor]) -> None:
        cell = min(max(0.3, 5.2 / max(len(queries), len(keys))), 0.55)
        width, height = (min(max(cell * len(names), 1.2), 11.0) for names in (keys, queries))
        left = MARGIN + 0.25 + _inches(queries)
        top = TITLE + 0.3 + _inches(keys)
        rows, columns = len(weights), max(layer.shape[0] for layer in weights)
        thumbnail = min(THUMBNAILS_WIDTH / columns, 0.62, max(height, 4.5) / rows)
        right = left + width + 0.75
        total_height = max(top + height, top + thumbnail * rows + 1.2) + MARGIN
        total_width = right + max(thumbnail * columns, 5.2) + MARGIN
        self.size = (total_width, total_height)

        def place(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
            return x / total_width, 1 - (y + h) / total_height, w / total_width, h / total_height

        self.large = place(left, top, width, height)
        self.thumbnails = place(right, top, thumbnail * columns, thumbnail * rows)
        self.color_bar = place(right, top + thumbnail * rows + 0.45, max(thumbnail * columns, 5.2), 0.13)
        self.heading = place(MARGIN, MARGIN, 0, 0)[:2]


def _draw_large(
    axes: Axes, weights: Tensor, queries: list[str], keys: list[str], colors: Colormap, fonts: list[str]
) -> AxesImage:
    image = axes.imshow(_shade(weights), cmap=colors, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for axis, names, turn in ((axes.xaxis, keys, 90), (axes.yaxis, queries, 0)):
        step = -(-len(names) // 60)
        places = list(range(0, len(names), step))
        axis.set_ticks(places, [names[place] for place in places])
        for label in axis.get_ticklabels():
            label.set(rotation=turn, fontsize=10, fontfamily=fonts, color=INK, parse_math=False)
    axes.tick_params(length=0, pad=4)
    axes.set_ylabel("query (looks)", color=QUIET, fontsize=9, loc="top")
    axes.set_xlabel("key (is looked at)", color=QUIET, fontsize=9, loc="left")
    for spine in axes.spines.values():
        spine.set_color(FRAME)
    return image


def _draw_thumbnails(axes: Axes, weights: Sequence[Tensor], chosen: tuple[int, int], colors: Colormap) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    columns = max(layer.shape[0] for layer in weights)
    mosaic = torch.cat([_mosaic_row(layer, columns) for layer in weights])
    axes.imshow(_shade(mosaic), cmap=colors, vmin=0, vmax=1, extent=(0, columns, len(weights), 0), aspect="auto")

    def frame(row: int, column: int) -> Rectangle:
        return Rectangle((column + GAP / 2, row + GAP / 2), 1 - GAP, 1 - GAP)

    frames = [frame(row, column) for row, layer in enumerate(weights) for column in range(layer.shape[0])]
    axes.add_collection(PatchCollection(frames, facecolor="none", edgecolor=FRAME, linewidth=0.5))
    axes.add_collection(PatchCollection([frame(*chosen)], facecolor="none", edgecolor=MARK, linewidth=2))
    step = -(-columns // 16)
    axes.set_xticks([column + 0.5 for column in range(0, columns, step)], [str(c) for c in range(0, columns, step)])
    axes.set_yticks([row + 0.5 for row in range(len(weights))], [str(row) for row in range(len(weights))])
    axes.tick_params(length=0, labelsize=8, labelcolor=QUIET)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("head", color=QUIET, fontsize=9)
    axes.set_ylabel("layer", color=QUIET, fontsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _mosaic_row(layer: Tensor, columns: int) -> Tensor:
    """One layer's heads side by side, each pooled by its maximum or enlarged to about `THUMBNAIL_PIXELS`."""
    heads, length, keys = layer.shape
    sizes = [
        size * -(-THUMBNAIL_PIXELS // size) if size < THUMBNAIL_PIXELS else THUMBNAIL_PIXELS for size in (length, keys)
    ]
    resize = torch.nn.functional.adaptive_max_pool2d if max(length, keys) >= THUMBNAIL_PIXELS else _enlarge
    small = resize(layer[None].float(), sizes)[0]  # (H, height, width)
    gaps = [round(size * GAP / (1 - GAP) / 2) for size in small.shape[1:]]
    small = torch.nn.functional.pad(small, (gaps[1], gaps[1], gaps[0], gaps[0]))
    small = torch.nn.functional.pad(small, (0, 0, 0, 0, 0, columns - heads))  # (columns, height, width)
    return small.transpose(0, 1).flatten(1)  # (height, columns · width)


def _enlarge(images: Tensor, sizes: list[int]) -> Tensor:
    return torch.nn.functional.interpolate(images, sizes, mode="nearest")


def _draw_color_bar(figure: Figure, axes: Axes, image: AxesImage) -> None:
    bar = figure.colorbar(image, cax=axes, orientation="horizontal")
    bar.set_ticks([tick**GAMMA for tick in BAR_TICKS], labels=[f"{tick:g}" for tick in BAR_TICKS])
    axes.tick_params(length=2, labelsize=8, labelcolor=QUIET, color=QUIET)
    axes.set_xlabel(NOTE, color=QUIET, fontsize=9, loc="left", linespacing=1.6)
    for spine in axes.spines.values():
        spine.set_color(FRAME)


def _shade(weights: Tensor) -> Any:
    return weights.detach().float().clamp(0, 1).pow(GAMMA).cpu().numpy()


def _labels(tokens: Sequence[str]) -> list[str]:
    return [_cut(token, 16) for token in printable(tokens)]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _inches(labels: list[str]) -> float:
    """About how wide the longest label is; characters beyond Latin count twice."""
    return max(sum(0.085 if ord(character) < 0x1100 else 0.15 for character in label) for label in labels) + 0.05


def _fonts() -> list[str]:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
