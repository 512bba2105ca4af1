"""One figure of a whole model on one text: the chosen head large, the others as thumbnails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._collect import LayerPicture, SectionPicture
from ._fonts import fonts
from ._head_grid import draw_head_numbers, draw_heads
from ._ink import INK, NOTE, QUIET, colors, draw_weights, shade, token_labels, weight_bar
from ._labels import layer_labels, shortened
from ._language import say
from ._scale import scale_end

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches.
MARGIN, TITLE, THUMBNAILS_WIDTH = 0.35, 0.55, 6.4
THUMBNAIL_PIXELS = 48


def draw_sheet(
    picture: SectionPicture,
    layer: int,
    head: int,
    *,
    title: str | None = None,
    numbers: tuple[str, Sequence[Sequence[float]]] | None = None,
) -> Figure:
    """Draw one head large, tokens on both axes, beside thumbnails of all heads.

    Colour is the square root of the weight, so that small weights stay visible. The colour bars are labelled with
    weights. Neither the backend nor a setting of matplotlib changes.

    Args:
        picture: from `collect`. The large head is exact if it has a crop or its map is exact.
        layer, head: places of the large head in the picture.
        title: a line above. Default: none.
        numbers: a statistic's name and one number per head, in place of the thumbnails.
    """
    from matplotlib.figure import Figure

    chosen = picture.layers[layer]
    weights = chosen.head_map(head)
    queries, keys = token_labels(picture.queries.names), token_labels(picture.keys.names)
    sheet = _Sheet(queries, keys, picture.layers)
    figure = Figure(figsize=sheet.size, facecolor="white")
    end = scale_end([weights])
    image = draw_weights(figure.add_axes(sheet.large), weights, (queries, keys), end=end)
    image.axes.xaxis.set_label_position("top")
    image.axes.set_ylabel(say("query (looks)"), color=QUIET, fontsize=9, loc="top")
    image.axes.set_xlabel(say("key (is looked at)"), color=QUIET, fontsize=9, loc="left")
    labels = layer_labels([each.name for each in picture.layers])
    thumbnails = figure.add_axes(sheet.thumbnails)
    if numbers is None:
        thumbnails_end = scale_end([each.map for each in picture.layers])
        cells = [torch.from_numpy(shade(_thumbnails(each.map), thumbnails_end)) for each in picture.layers]
        draw_heads(thumbnails, cells, labels, chosen=(layer, head), cmap=colors(), vmin=0, vmax=1, aspect="auto")
        with_end = say("all heads; their scale ends at {0}", f"{thumbnails_end:g}")
        what = say("all heads") if thumbnails_end == end else with_end
    else:
        draw_head_numbers(thumbnails, numbers[1], labels, (layer, head))
        what = say("{0} of all heads", numbers[0])
    thumbnails.set_title(what, loc="left", fontsize=9, color=QUIET, pad=22)
    where = "" if numbers is None else say("left: ")
    tiles = tuple(weights.shape) != (len(queries), len(keys))
    what = say("weight of a tile in its query's row") if tiles else say("weight of a key in its query's row")
    caption = f"{where}{what}\n{say(NOTE)}"
    weight_bar(figure, image, end=end, caption=caption, cax=figure.add_axes(sheet.color_bar), orientation="horizontal")
    heading = say("layer {0}, head {1}", labels[layer], chosen.heads[head])
    heading = heading if title is None else f"{shortened(title, 90)}   ·   {heading}"
    figure.text(*sheet.heading, heading, color=INK, fontsize=12, fontfamily=fonts(heading), parse_math=False)
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


def _thumbnails(maps: Tensor) -> Tensor:
    """A layer's heads, each pooled by its maximum or enlarged to about `THUMBNAIL_PIXELS`: (H, height, width)."""
    sizes = [
        size * -(-THUMBNAIL_PIXELS // size) if size < THUMBNAIL_PIXELS else THUMBNAIL_PIXELS for size in maps.shape[1:]
    ]
    if max(maps.shape[1:]) >= THUMBNAIL_PIXELS:
        return torch.nn.functional.adaptive_max_pool2d(maps, sizes)
    return torch.nn.functional.interpolate(maps[None], sizes, mode="nearest")[0]


def _inches(labels: list[str]) -> float:
    """About how wide the longest label is; wide characters count twice."""
    from rich.cells import cell_len

    return 0.085 * max(cell_len(label) for label in labels) + 0.05
