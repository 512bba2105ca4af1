"""matplotlib pictures of what a vision model reads: weights over the image, one head or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import integer
from .._statistics.patch_layout import PatchLayout
from .._statistics.recorded import Recorded
from ._collect import require_record
from ._crops import head_place
from ._head_grid import draw_heads
from ._image_items import layouts_of
from ._ink import MARK, RAMP, colors, new_axes, plain_frame, style_bar
from ._labels import layer_labels
from ._language import say
from ._patch_looks import ENDS, Query, end_of, even_weight, levels_of, looks_of, query_name, query_number
from ._picture import seen_picture
from ._sections import item_places
from ._spoken import spoken_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: How much of the picture's own contrast is left under the weights: enough to recognise it, and never as dark as them.
LEFT = 0.4
GREY = (0.299, 0.587, 0.114)
THUMBNAIL = 96  # pixels
GAP = 0.08  # of a thumbnail, between neighbours


@spoken_picture
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
    language: str = "en",
) -> Axes:
    """Draw what a token of a vision model looks at, over the image: one head, or every head as a thumbnail.

    Colour follows the logarithm of a patch's weight, in multiples of the weight that it had if all tokens were alike.
    Patches with no more than that stay pale, and so does the picture of a head that attends to everything alike.

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
        language: as for `plot_map`.

    Returns:
        The axes.

    Raises:
        RecordError: if queries and keys were not kept.
        ArgumentError: for a model whose patches have no known places, an unknown layer, head, query or language, or a
            file that is no picture.
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
    places = item_places(rec, names)
    call, place = places[integer("item", item, least=0, most=len(places) - 1)]
    looks = [looks_of(rec, name, layouts[name], query, (call, place)) for name in names]
    name = query_name(layouts[names[0]], query)
    labels, shapes = _labels(layouts, names), [layouts[name] for name in names]
    if head is not None:
        looks = [looks[0][head_place(head, rec[names[0]][0].heads, names[0])]]
    end = end_of(looks, shapes)
    levels = [levels_of(each, shape, end) for each, shape in zip(looks, shapes, strict=True)]
    if head is not None:
        axes = new_axes(ax, (5.4, 5.0))
        draw_over(axes, picture, levels[0], shapes[0], query)
        title = say("layer {0}, head {1}: what {2} looks at", labels[0], head, name)
    else:
        most = max(len(each) for each in looks)
        axes = new_axes(ax, (min(1.2 + 0.9 * most, 15), min(max(1.2 + 0.9 * len(looks), 3.6), 15)))
        draw_thumbnails(axes, picture, levels, shapes, labels)
        where = say("every head") if layer is None else say("layer {0}", labels[0])
        title = say("{0}: what {1} looks at", where, name)
    axes.set_title(title, loc="left")
    patch_bar(axes.figure, shapes[0], end, ax=axes)
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
    return [numbers.get(name) or say("pooling") for name in names]


def over_picture(picture: Tensor, levels: Tensor, layout: PatchLayout) -> Tensor:
    """Lay weights over a picture: darker and bluer where there is more weight, the picture showing through in grey.

    Args:
        picture: (3, height, width), uint8.
        levels: (rows, columns) of patches, from `levels_of`.
        layout: where they lie.

    Returns:
        (height, width, 3) in [0, 1].
    """
    import numpy
    from matplotlib.colors import to_rgba_array

    stops = to_rgba_array(RAMP)  # `colors` has 256 steps, too few to tell weights apart
    planes = [numpy.interp(levels, numpy.linspace(0, 1, len(stops)), stops[:, plane]) for plane in range(3)]
    color = torch.tensor(numpy.stack(planes, -1), dtype=torch.float32)  # (rows, columns, 3)
    height, width = layout.patch
    color = color.repeat_interleave(height, 0).repeat_interleave(width, 1)  # (grid pixels, …, 3)
    grey = torch.tensordot(torch.tensor(GREY), picture.float() / 255, 1)  # no colour of its own is taken for a weight
    result = (1 - LEFT * (1 - grey))[..., None].repeat(1, 1, 3)
    result[: color.shape[0], : color.shape[1]] *= color
    return result


def draw_over(axes: Axes, picture: Tensor, levels: Tensor, layout: PatchLayout, query: Query | None) -> None:
    """Draw `over_picture`, with a frame around the query if it is a patch."""
    from matplotlib.patches import Rectangle

    show_image(axes, over_picture(picture, levels, layout).numpy())
    number = query_number(layout, query)
    if number is not None and layout.queries is None and number >= len(layout.prefix):
        row, column = divmod(number - len(layout.prefix), layout.grid[1])
        height, width = layout.patch
        corner = (column * width - 0.5, row * height - 0.5)
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=MARK, linewidth=2))


def show_image(axes: Axes, pixels: Any, **look: Any) -> None:
    """Draw pixels with a thin frame and no ticks."""
    axes.imshow(pixels, interpolation="nearest", **look)
    axes.set(xticks=[], yticks=[])
    plain_frame(axes)


def draw_thumbnails(
    axes: Axes,
    picture: Tensor,
    levels: Sequence[Tensor],
    layouts: Sequence[PatchLayout],
    labels: Sequence[str],
    chosen: tuple[int, int] | None = None,
) -> None:
    """Draw `over_picture` small for each head. `levels` has (H, rows, columns) per layer."""
    scale = THUMBNAIL / max(layouts[0].size)
    small = [max(1, round(side * scale)) for side in layouts[0].size]
    mode = "area" if tuple(small) < layouts[0].size else "nearest"
    cells: list[Tensor] = []
    for heads, layout in zip(levels, layouts, strict=True):
        over = torch.stack([over_picture(picture, each, layout) for each in heads]).permute(0, 3, 1, 2)
        cells.append(torch.nn.functional.interpolate(over, small, mode=mode).permute(0, 2, 3, 1))  # (H, h, w, 3)
    aspect = small[0] / small[1]
    draw_heads(axes, cells, labels, gap=GAP, empty=1.0, chosen=chosen, interpolation="antialiased", aspect=aspect)


def patch_bar(figure: Any, layout: PatchLayout, end: float, *, note: str = "", **place: Any) -> None:
    """A colour bar that prints multiples of the even weight; `place` is for `Figure.colorbar`."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    ticks = torch.tensor([1.0, *(tick for tick in (2, *ENDS) if tick <= end)])
    labels = [f"{tick:g}×" for tick in ticks.tolist()]
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), colors()), **place)
    bar.set_ticks(
        levels_of(ticks * even_weight(layout), layout, end).tolist(), labels=[*labels[:-1], f"≥ {labels[-1]}"]
    )
    caption = say("weight of a patch in the query's row; 1× is the even weight, 1/{0}", layout.length)
    style_bar(bar, caption + note)
