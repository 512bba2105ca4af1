"""matplotlib pictures of what a vision model reads: weights over the image, one head or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import index, integer, shown
from .._statistics.patch_layout import PatchLayout
from .._statistics.recorded import Recorded
from ..errors import ArgumentError
from ._collect import item_places, require_record
from ._crops import head_place
from ._head_grid import draw_head_numbers, draw_heads
from ._image_items import layouts_of
from ._ink import (
    INK,
    MARK,
    NOTE,
    QUIET,
    RAMP,
    colors,
    fonts,
    new_axes,
    plain_frame,
    shade,
    weight_bar,
)
from ._labels import layer_labels, shortened
from ._picture import seen_picture
from ._scale import scale_end

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: How much of the picture's own contrast is left under the weights: enough to recognise it, and never as dark as them.
LEFT = 0.4
GREY = (0.299, 0.587, 0.114)
THUMBNAIL = 96  # pixels
GAP = 0.08  # of a thumbnail, between neighbours
WEIGHT = "weight of a patch in the query's row"

Query = int | str | tuple[int, int]


def plot_image(
    rec: Recorded,
    image: Any,
    layer: int | str | None = None,
    head: int | None = None,
    query: Query | None = None,
    *,
    processor: Any = None,
    item: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw what a token of a vision model looks at, over the image: one head, or every head as a thumbnail.

    Patches, registers and class tokens are placed by the model's own configuration: transformers' ViT, DeiT, DINOv2
    and the vision side of CLIP and SigLIP, and the vision transformers of timm. Other models are refused.

    Args:
        rec: made with ``keep="queries_keys"``.
        image: the model's input as a path, a picture of Pillow, or numbers (h, w), (h, w, 3) or (3, h, w), uint8 or
            floats. Without a processor it has the size of the input.
        layer: number in running order, or module name. Default: all layers, or with a head the last one.
        head: its number. Default: all heads, as thumbnails.
        query: (row, column) of a patch, a token's number, or its name (``"class"``, ``"register 1"``). Default: the
            class token, or the pooling. Models without either show the mean over the patches.
        processor: the image processor of transformers that made the model's input from `image`, or a function from a
            picture to the input (3, h, w). It resizes and crops `image` in the same way here.
        item: the batch item, counted over calls. Default: the first.
        ax: the axes. Default: a new figure.

    Returns:
        The axes.

    Raises:
        RecordError: if queries and keys were not kept.
        ArgumentError: for a model whose patches have no known places, an unknown layer, head or query, or a file that
            is no picture.
        ShapeError: if the image has not the size of the model's input.

    Example:
        >>> import torch, clearhead
        >>> from transformers import ViTConfig, ViTModel
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
        >>> model = ViTModel(ViTConfig(image_size=12, patch_size=4, **sizes)).eval()
        >>> pixels = torch.rand(1, 3, 12, 12)
        >>> with torch.no_grad(), clearhead.record(model, keep="queries_keys") as rec:
        ...     _ = model(pixel_values=pixels)
        >>> rec.plot_image(pixels[0], layer=1, head=0, query=(1, 2)).get_title("left")
        'layer 1, head 0: what patch 1, 2 looks at'
    """
    require_record(rec)
    layouts = layouts_of(rec)
    every = _alike(layouts, query)
    if layer is None and head is not None:
        layer = every[-1]
    names = every if layer is None else [rec.name_of(layer)]
    for name in names:
        layouts.setdefault(name, rec.patches(name))  # raises, if it is not known
    picture = seen_picture(image, layouts[names[0]].size, processor)
    call, place = item_places(rec)[integer("item", item, least=0, most=len(item_places(rec)) - 1)]
    looks = [looks_of(rec, name, layouts[name], query, (call, place)) for name in names]
    what = query_name(layouts[names[0]], query)
    labels = _labels(layouts, names)
    if head is not None:
        weights = looks[0][head_place(head, rec[names[0]][0].heads, names[0])]
        axes = new_axes(ax, (5.4, 5.0))
        end = scale_end([weights])
        image_drawn = _draw_over(axes, picture, weights, layouts[names[0]], query, end)
        axes.set_title(f"layer {labels[0]}, head {head}: what {what} looks at", loc="left")
        weight_bar(axes.figure, image_drawn, end=end, caption=WEIGHT, ax=axes)
        return axes
    most = max(len(each) for each in looks)
    axes = new_axes(ax, (min(1.2 + 0.9 * most, 15), min(max(1.2 + 0.9 * len(looks), 3.6), 15)))
    end = scale_end(looks)
    _draw_thumbnails(axes, picture, looks, [layouts[name] for name in names], labels, end, None)
    where = "every head" if layer is None else f"layer {labels[0]}"
    axes.set_title(f"{where}: what {what} looks at", loc="left")
    weight_bar(axes.figure, _scale_image(), end=end, caption=WEIGHT, ax=axes)
    return axes


def _alike(layouts: dict[str, PatchLayout], query: Query | None) -> list[str]:
    """The modules in which a query of that name looks: where tokens attend, or, with no class token, the pooling."""
    pooling = [name for name, layout in layouts.items() if layout.queries]
    tokens = [name for name, layout in layouts.items() if not layout.queries]
    wants_pooling = query is None and not any(layouts[name].prefix for name in tokens)
    return pooling if pooling and (wants_pooling or not tokens) else tokens


def _labels(layouts: dict[str, PatchLayout], names: Sequence[str]) -> list[str]:
    """The names of the layers in pictures: numbers, or ``pooling``."""
    tokens = [name for name, layout in layouts.items() if not layout.queries]
    numbers = dict(zip(tokens, layer_labels(tokens), strict=True))
    return [numbers.get(name, "pooling") for name in names]


def over_picture(picture: Tensor, weights: Tensor, layout: PatchLayout, end: float) -> Tensor:
    """Lay weights over a picture: darker and bluer where there is more weight, the picture showing through in grey.

    Args:
        picture: (3, height, width), uint8.
        weights: (rows, columns) of patches.
        layout: where they lie.
        end: of the colour scale.

    Returns:
        (height, width, 3) in [0, 1].
    """
    import numpy
    from matplotlib.colors import to_rgba_array

    stops, level = to_rgba_array(RAMP), shade(weights, end)  # `colors` has 256 steps, too few to tell weights apart
    planes = [numpy.interp(level, numpy.linspace(0, 1, len(stops)), stops[:, plane]) for plane in range(3)]
    color = torch.tensor(numpy.stack(planes, -1), dtype=torch.float32)  # (rows, columns, 3)
    height, width = layout.patch
    color = color.repeat_interleave(height, 0).repeat_interleave(width, 1)  # (grid pixels, …, 3)
    grey = torch.tensordot(torch.tensor(GREY), picture.float() / 255, 1)  # no colour of its own is taken for a weight
    result = (1 - LEFT * (1 - grey))[..., None].repeat(1, 1, 3)
    result[: color.shape[0], : color.shape[1]] *= color
    return result


def looks_of(rec: Recorded, name: str, layout: PatchLayout, query: Query | None, place: tuple[int, int]) -> Tensor:
    """The weights of the query in every head, (H, rows, columns)."""
    call, item = place
    number = _query_number(layout, query)
    queries = slice(len(layout.prefix), None) if number is None else [number]
    found = rec[name][call]
    weights = rec.weights(name, None, queries, call)[item, list(found.heads)].float().cpu().mean(1)  # (H, S)
    return weights[:, len(layout.prefix) :].unflatten(1, layout.grid)


def _query_number(layout: PatchLayout, query: Query | None) -> int | None:
    """A query's row; ``None`` for the mean over the patches."""
    names = list(layout.queries or layout.names())
    if query is None:
        return 0 if layout.queries or layout.prefix else None
    if isinstance(query, str):
        if query not in names:
            known = ", ".join([*layout.prefix, "patch 0, 0", "…"]) if layout.queries is None else ", ".join(names)
            raise ArgumentError("query", expected=f"one of {known}", got=shown(query))
        return names.index(query)
    if isinstance(query, (tuple, list)):
        if len(query) != 2 or layout.queries is not None:
            raise ArgumentError("query", expected="(row, column) of a patch", got=shown(query))
        row, column = (
            integer("query", at, least=0, most=most - 1) for at, most in zip(query, layout.grid, strict=True)
        )
        return len(layout.prefix) + row * layout.grid[1] + column
    return index("query", query, len(names))


def query_name(layout: PatchLayout, query: Query | None) -> str:
    """The query in words."""
    number = _query_number(layout, query)
    if number is None:
        return "a patch, on average,"
    name = (layout.queries or layout.names())[number]
    return f"the {name} token" if name in layout.prefix and " " not in name else name


def _draw_over(
    axes: Axes, picture: Tensor, weights: Tensor, layout: PatchLayout, query: Query | None, end: float
) -> Any:
    from matplotlib.patches import Rectangle

    axes.imshow(over_picture(picture, weights, layout, end).numpy(), interpolation="nearest")
    number = _query_number(layout, query)
    if number is not None and layout.queries is None and number >= len(layout.prefix):
        row, column = divmod(number - len(layout.prefix), layout.grid[1])
        height, width = layout.patch
        corner = (column * width - 0.5, row * height - 0.5)
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=MARK, linewidth=2))
    axes.set(xticks=[], yticks=[])
    plain_frame(axes)
    return _scale_image()


def _scale_image() -> Any:
    """The scale of the colour bar, because the picture itself has mixed colours."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    mapped = ScalarMappable(Normalize(0, 1), colors())
    mapped.set_array([0.0])
    return mapped


def _draw_thumbnails(
    axes: Axes,
    picture: Tensor,
    looks: Sequence[Tensor],
    layouts: Sequence[PatchLayout],
    labels: Sequence[str],
    end: float,
    chosen: tuple[int, int] | None,
) -> None:
    scale = THUMBNAIL / max(layouts[0].size)
    small = [max(1, round(side * scale)) for side in layouts[0].size]
    mode = "area" if tuple(small) < layouts[0].size else "nearest"
    cells: list[Tensor] = []
    for heads, layout in zip(looks, layouts, strict=True):
        over = torch.stack([over_picture(picture, weights, layout, end) for weights in heads]).permute(0, 3, 1, 2)
        cells.append(torch.nn.functional.interpolate(over, small, mode=mode).permute(0, 2, 3, 1))  # (H, h, w, 3)
    aspect = small[0] / small[1]
    draw_heads(axes, cells, labels, gap=GAP, empty=1.0, chosen=chosen, interpolation="antialiased", aspect=aspect)


def draw_image_sheet(
    rec: Recorded,
    picture: Tensor,
    chosen: tuple[str, int],
    *,
    title: str,
    numbers: tuple[str, Sequence[Sequence[float]]] | None = None,
) -> Figure:
    """Draw the picture, what the class token or the mean of the patches looks at in one head, and every head small.

    `chosen` is the module and the number of the large head. `numbers` replaces the thumbnails, as in `draw_sheet`.
    """
    from matplotlib.figure import Figure

    layouts = {name: layout for name, layout in layouts_of(rec).items() if layout.queries is None}
    names = list(layouts)
    looks = [looks_of(rec, name, layouts[name], None, (0, 0)) for name in names]
    place = (names.index(chosen[0]), list(rec[chosen[0]][0].heads).index(chosen[1]))
    weights, layout = looks[place[0]][place[1]], layouts[chosen[0]]
    most, ratio = max(len(each) for each in looks), layout.size[0] / layout.size[1]
    side = 4.6
    thumbnail = min(0.8, 9 / most)
    low = max(side * ratio, thumbnail * ratio * len(looks))
    figure = Figure(figsize=(2 * side + thumbnail * most + 1.4, low + 1.7), facecolor="white", layout="constrained")
    widths = (side, side, thumbnail * most + 0.4)
    plain, large, small = figure.subplots(1, 3, width_ratios=widths)
    for axes in (plain, large, small):
        axes.set_anchor("N")
    plain.imshow(picture.permute(1, 2, 0).numpy(), interpolation="nearest")
    plain.set(xticks=[], yticks=[])
    plain_frame(plain)
    plain.set_title("what the model was shown", loc="left", fontsize=10, color=QUIET)
    ends = (scale_end([weights]), scale_end(looks))
    bar = _draw_over(large, picture, weights, layout, None, ends[0])
    labels = layer_labels(names)
    what = f"layer {labels[place[0]]}, head {chosen[1]}: what {query_name(layout, None)} looks at"
    large.set_title(what, loc="left", fontsize=10, color=INK)
    if numbers is None:
        _draw_thumbnails(small, picture, looks, [layouts[name] for name in names], labels, ends[1], place)
        what = "every head" if ends[0] == ends[1] else f"every head; their scale ends at {ends[1]:g}"
    else:
        draw_head_numbers(small, numbers[1], labels, place)
        small.set_aspect("equal")
        what = f"{numbers[0]} of all heads"
    small.set_title(what, loc="left", fontsize=10, color=QUIET)
    caption = f"{WEIGHT}\n{NOTE}"
    weight_bar(figure, bar, end=ends[0], caption=caption, ax=large, orientation="horizontal", aspect=40, pad=0.02)
    figure.suptitle(
        shortened(title, 110), x=0.01, ha="left", color=INK, fontsize=12, fontfamily=fonts(), parse_math=False
    )
    return figure
