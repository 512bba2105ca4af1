"""One figure of a whole model on one text: the chosen head large, the others as thumbnails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._collect import LayerPicture, SectionPicture
from ._ink import (
    FRAME,
    INK,
    MARK,
    NOTE,
    QUIET,
    colors,
    draw_weights,
    fonts,
    label_heads,
    shade,
    token_labels,
    weight_bar,
)
from ._labels import layer_labels, shortened
from ._scale import scale_end

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Inches.
MARGIN, TITLE, THUMBNAILS_WIDTH = 0.35, 0.55, 6.4
THUMBNAIL_PIXELS, GAP = 48, 0.14


def draw_sheet(
    picture: SectionPicture,
    layer: int,
    head: int,
    *,
    title: str | None = None,
    numbers: tuple[str, Sequence[Sequence[float]]] | None = None,
) -> Figure:
    """Draw one head large, tokens on both axes, beside thumbnails of all heads.

    Colour stands for the square root of the weight, so that faint weights stay visible; the colour bars are labelled
    with weights. No global matplotlib state is touched: no backend is chosen, no setting changed.

    Args:
        picture: from `collect`; the large head is exact if it has a crop or its map is.
        layer, head: which head is large, as places in the picture.
        title: a line above. Default: none.
        numbers: a statistic's name and one number per head, shown in place of the thumbnails.
    """
    from matplotlib.figure import Figure

    found = picture.layers[layer]
    weights = large_weights(found, found.heads[head])
    queries, keys = token_labels(picture.queries.names), token_labels(picture.keys.names)
    sheet = _Sheet(queries, keys, picture.layers)
    figure = Figure(figsize=sheet.size, facecolor="white")
    end = scale_end([weights])
    image = draw_large(figure.add_axes(sheet.large), weights, (queries, keys), end=end)
    image.axes.xaxis.set_label_position("top")
    image.axes.set_ylabel("query (looks)", color=QUIET, fontsize=9, loc="top")
    image.axes.set_xlabel("key (is looked at)", color=QUIET, fontsize=9, loc="left")
    labels = layer_labels([each.name for each in picture.layers])
    thumbnails = figure.add_axes(sheet.thumbnails)
    if numbers is None:
        thumbnails_end = scale_end([each.map for each in picture.layers])
        _draw_thumbnails(thumbnails, picture.layers, thumbnails_end)
        what = "all heads" if thumbnails_end == end else f"all heads; their scale ends at {thumbnails_end:g}"
    else:
        what = f"{numbers[0]} of all heads"
        draw_numbers(thumbnails, numbers[1])
    frame_heads(thumbnails, [len(each.heads) for each in picture.layers], (layer, head), labels)
    thumbnails.set_title(what, loc="left", fontsize=9, color=QUIET, pad=22)
    where = "" if numbers is None else "left: "
    tiles = tuple(weights.shape) != (len(queries), len(keys))
    caption = f"{where}weight of a {'tile' if tiles else 'key'} in its query's row\n{NOTE}"
    weight_bar(figure, image, end=end, caption=caption, cax=figure.add_axes(sheet.color_bar), orientation="horizontal")
    heading = f"layer {labels[layer]}, head {found.heads[head]}"
    heading = heading if title is None else f"{shortened(title, 90)}   ·   {heading}"
    figure.text(*sheet.heading, heading, color=INK, fontsize=12, fontfamily=fonts(), parse_math=False)
    return figure


class _Sheet:
    """Where the parts of the figure lie, as matplotlib's (left, bottom, width, height) fractions."""

    def __init__(self, queries: list[str], keys: list[str], layers: Sequence[LayerPicture]) -> None:
        cell = min(max(0.3, 5.2 / max(len(queries), len(keys))), 0.55)
        width, height = (min(max(cell * len(names), 1.2), 9.0) for names in (keys, queries))
        left = MARGIN + 0.25 + _inches(queries)
        top = TITLE + 0.3 + _inches(keys)
        rows, columns = len(layers), max(len(layer.heads) for layer in layers)
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


def large_weights(layer: LayerPicture, head: int) -> Tensor:
    """All that is known of a head's weights, (L, S), or tiles of them."""
    crop = layer.crops.get(head)
    if crop is not None and tuple(crop.weights.shape) == (layer.entropy.shape[1], layer.received.shape[1]):
        return crop.weights  # not a part of a text that is too long for a picture
    index = layer.heads.index(head)
    return layer.exact_map[index] if layer.exact else layer.map[index]


def draw_large(
    axes: Axes, weights: Tensor, tokens: tuple[Sequence[str], Sequence[str]], *, end: float, **look: Any
) -> AxesImage:
    """`draw_weights`, smoothed where there are more of them than a figure has room for."""
    return draw_weights(
        axes, weights, tokens, end=end, interpolation="nearest" if max(weights.shape) < 200 else "antialiased", **look
    )


def _draw_thumbnails(axes: Axes, layers: Sequence[LayerPicture], end: float) -> None:
    columns = max(len(layer.heads) for layer in layers)
    mosaic = torch.cat([_mosaic_row(layer.map, columns) for layer in layers])
    extent = (0, columns, len(layers), 0)
    axes.imshow(shade(mosaic, end), cmap=colors(), vmin=0, vmax=1, extent=extent, aspect="auto")


def draw_numbers(axes: Axes, numbers: Sequence[Sequence[float]]) -> None:
    """Draw one number per layer and head, each on a square whose colour follows it."""
    from matplotlib.patches import Rectangle

    everything = [value for row in numbers for value in row]
    low, width = min(everything), (max(everything) - min(everything)) or 1.0
    ramp = colors()
    for row, values in enumerate(numbers):
        for column, value in enumerate(values):
            share = (value - low) / width
            place = (column + GAP / 2, row + GAP / 2)
            # The darkest ink would hide what is written on it.
            axes.add_patch(Rectangle(place, 1 - GAP, 1 - GAP, facecolor=ramp(0.03 + 0.77 * share), edgecolor="none"))
            text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
            ink = "white" if share > 0.5 else INK
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7.5, color=ink)
    axes.set_xlim(0, max(len(row) for row in numbers))
    axes.set_ylim(len(numbers), 0)


def frame_heads(axes: Axes, heads: Sequence[int], chosen: tuple[int, int], labels: Sequence[str]) -> None:
    """Put a frame around every square of a table, a thick one around the chosen head, and number them.

    Args:
        axes: which show the table, a unit per square.
        heads: how many each layer has.
        chosen: layer and head.
        labels: of the layers.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    def frame(row: int, column: int) -> Rectangle:
        return Rectangle((column + GAP / 2, row + GAP / 2), 1 - GAP, 1 - GAP)

    frames = [frame(row, column) for row, count in enumerate(heads) for column in range(count)]
    axes.add_collection(PatchCollection(frames, facecolor="none", edgecolor=FRAME, linewidth=0.5))
    axes.add_collection(PatchCollection([frame(*chosen)], facecolor="none", edgecolor=MARK, linewidth=2))
    label_heads(axes, max(heads), labels)


def _mosaic_row(maps: Tensor, columns: int) -> Tensor:
    """One layer's heads side by side, each pooled by its maximum or enlarged to about `THUMBNAIL_PIXELS`."""
    heads, length, keys = maps.shape
    sizes = [
        size * -(-THUMBNAIL_PIXELS // size) if size < THUMBNAIL_PIXELS else THUMBNAIL_PIXELS for size in (length, keys)
    ]
    resize = torch.nn.functional.adaptive_max_pool2d if max(length, keys) >= THUMBNAIL_PIXELS else _enlarge
    small = resize(maps[None], sizes)[0]  # (H, height, width)
    gaps = [round(size * GAP / (1 - GAP) / 2) for size in small.shape[1:]]
    small = torch.nn.functional.pad(small, (gaps[1], gaps[1], gaps[0], gaps[0]))
    small = torch.nn.functional.pad(small, (0, 0, 0, 0, 0, columns - heads))  # (columns, height, width)
    return small.transpose(0, 1).flatten(1)  # (height, columns · width)


def _enlarge(images: Tensor, sizes: list[int]) -> Tensor:
    return torch.nn.functional.interpolate(images, sizes, mode="nearest")


def _inches(labels: list[str]) -> float:
    """About how wide the longest label is; characters beyond Latin count twice."""
    return max(sum(0.085 if ord(character) < 0x1100 else 0.15 for character in label) for label in labels) + 0.05
