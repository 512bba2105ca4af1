"""From a record of a vision model to what pictures show: every weight between patches, or between tiles of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._statistics.patch_layout import PatchLayout
from .._statistics.recorded import Recorded
from ..errors import ArgumentError, ClearheadError, RecordError, ShapeError
from ._collect import ItemPicture, LayerPicture, SectionPicture, collect
from ._patch_looks import in_order
from ._patches import Tiles
from ._picture import seen_picture
from ._sections import item_places
from ._tokens import Tokens

#: Weights that a page holds of one batch item; at most one byte each before they are packed.
MOST_WEIGHTS = 5_700_000
ROWS_AT_A_TIME = 64


def layouts_of(rec: Recorded) -> dict[str, PatchLayout]:
    """Module → the places of its tokens, for every module that attends between patches.

    Without such a module, the error of the first module is raised.
    """
    layouts: dict[str, PatchLayout] = {}
    first: ClearheadError | None = None
    for name in rec:
        try:
            layouts[name] = rec.patches(name)
        except ArgumentError as error:
            first = first or error
    if not layouts:
        raise first or ArgumentError("rec", expected="a record with calls", got="an empty one")
    return layouts


def image_items(rec: Recorded, *, most: int = MOST_WEIGHTS) -> list[ItemPicture]:
    """Collect the record of a vision model for a page.

    The record needs every weight: queries and keys, or exact maps. If a batch item has more than `most` weights,
    patches are pooled to tiles.
    """
    layouts = layouts_of(rec)
    items: list[ItemPicture] = []
    for picture, place in zip(collect(rec, layers=layouts), item_places(rec, layouts), strict=True):
        sections = picture.sections
        side = _tile_side(sections, layouts, most)
        parts = [_section(rec, part, Tiles(layouts[part.section.layers[0]], side), place) for part in sections]
        items.append(replace(picture, sections=parts))
    return items


def with_pictures(rec: Recorded, image: Any, processor: Any, *others: Any) -> list[ItemPicture]:
    """`image_items` with the picture of each, for `clearhead.plot.page`.

    `image` is one picture, or a list with one per batch item. `others` must be ``None``.
    """
    if any(other is not None for other in others):
        raise ArgumentError("tokens", expected="None beside image", got="tokens")
    items = image_items(rec)
    images = list(image) if isinstance(image, (list, tuple)) else [image]
    if len(images) != len(items):
        expected = f"{len(items)} pictures, one per batch item"
        raise ShapeError("image", expected=expected, got=str(len(images)))
    result: list[ItemPicture] = []
    for picture, item in zip(images, items, strict=True):
        size = next(part.tiles.layout.size for part in item.sections if part.tiles is not None)
        result.append(replace(item, picture=seen_picture(picture, size, processor)))
    return result


def _tile_side(sections: list[SectionPicture], layouts: dict[str, PatchLayout], most: int) -> int:
    side = 1
    while True:
        count = 0
        for part in sections:
            tiles = Tiles(layouts[part.section.layers[0]], side)
            rows = tiles.length if part.section.same else part.layers[0].size[0]
            count += sum(len(layer.heads) for layer in part.layers) * rows * tiles.length
        if count <= most or side >= max(max(layout.grid) for layout in layouts.values()):
            return side
        side += 1


def _section(rec: Recorded, part: SectionPicture, tiles: Tiles, place: tuple[int, int]) -> SectionPicture:
    keys = tiles.tokens()
    names = tiles.layout.queries
    queries = keys if names is None else Tokens(names, [True] * len(names), range(len(names)))
    layers = [_layer(rec, layer, tiles, place) for layer in part.layers]
    title = part.section.title if names is None else "pooling"
    section = replace(part.section, title=title)
    return SectionPicture(section, queries, keys, layers, tiles)


def _layer(rec: Recorded, layer: LayerPicture, tiles: Tiles, place: tuple[int, int]) -> LayerPicture:
    same = tiles.layout.queries is None
    if layer.exact and tiles.side == 1:
        return layer
    call, item = place
    rows: list[Tensor] = []
    for first in range(0, layer.size[0], ROWS_AT_A_TIME):
        part = list(range(first, min(first + ROWS_AT_A_TIME, layer.size[0])))
        try:
            weights = rec.weights(layer.name, None, part, call)[item, list(layer.heads)].float().cpu()
        except RecordError as error:
            raise RecordError(
                "rec",
                expected=f"every weight between the {layer.size[1]} tokens",
                got="a record without queries and keys",
                fix="Record with keep='queries_keys'.",
            ) from error
        rows.append(tiles.merge(weights, 2, mean=False))  # (H, rows, tiles)
    weights = torch.cat(rows, 1)

    entropy, normalized_entropy = layer.entropy, layer.normalized_entropy
    if same:
        # weights: (H, tiles, tiles)
        weights, entropy, normalized_entropy = (
            tiles.merge(values, 1, mean=True) for values in (weights, entropy, normalized_entropy)
        )
    largest, indices = weights.topk(min(8, weights.shape[-1]), -1)
    order = in_order(largest, indices)
    sizes = (weights.shape[1], weights.shape[2])
    return replace(
        layer,
        size=sizes,
        queries=(0, sizes[0]),
        keys=(0, sizes[1]),
        map=weights,
        entropy=entropy,
        normalized_entropy=normalized_entropy,
        received=tiles.merge(layer.received, 1, mean=False) * (sizes[0] / layer.size[0]),
        indices=indices.gather(-1, order),
        weights=largest.gather(-1, order),
        crops={},
        word_entropy=None,
        rounded=True,
    )
