"""Exact weights of chosen heads, for pictures of texts that are too long to hold every weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .._checks import items as items_of
from .._checks import require_slice, shown
from .._statistics.distributions import row_entropy
from .._statistics.recorded import Recorded
from ..errors import ArgumentError, DTypeError
from ._collect import Crop, ItemPicture, LayerPicture, SectionPicture
from ._sections import item_places
from ._words import has_pieces, merge_words

CropRequest = tuple[int | str, int] | tuple[int | str, int, slice, slice]

CROPS = "a list of (layer, head) or (layer, head, queries, keys)"
#: A head given without slices is cut to so many queries and keys; 1024 × 1024 weights are about 1 MB of page.
CROP_SIDE = 1024
ROWS_AT_A_TIME = 128


def with_crops(rec: Recorded, items: Sequence[ItemPicture], crops: Sequence[CropRequest]) -> list[ItemPicture]:
    """Add the exact weights of some heads to every item of a record made with ``keep="queries_keys"``.

    A crop is (layer, head), or (layer, head, queries, keys) with slices of positions without padding. The default
    slices are the first 1024.
    """
    crops = items_of("crops", crops, CROPS)
    return [with_crops_of(rec, picture, number, crops) for number, picture in enumerate(items)]


def with_crops_of(rec: Recorded, picture: ItemPicture, number: int, crops: Sequence[CropRequest]) -> ItemPicture:
    """Add the exact weights of some heads to one item, whose number is counted over calls."""
    place = item_places(rec, [layer.name for part in picture.sections for layer in part.layers])[number]
    wanted = [(rec.name_of(layer), head, slices) for layer, head, *slices in map(_checked_crop, crops)]

    def cut(section: SectionPicture, layer: LayerPicture) -> LayerPicture:
        for _, head, slices in [each for each in wanted if each[0] == layer.name]:
            head_place(head, layer.heads, layer.name)  # raises, if it is not there
            if not layer.exact:
                crop = cut_crop(rec, section, layer, head, place, slices or [slice(CROP_SIDE), slice(CROP_SIDE)])
                layer = replace(layer, crops=layer.crops | {head: crop})
        return layer

    sections = [replace(part, layers=[cut(part, layer) for layer in part.layers]) for part in picture.sections]
    return replace(picture, sections=sections)


def _checked_crop(crop: object) -> tuple[Any, ...]:
    expected = "(layer, head) or (layer, head, queries, keys) with slices"
    parts = tuple(crop) if isinstance(crop, (tuple, list)) else ()
    if len(parts) not in (2, 4) or not all(isinstance(part, slice) for part in parts[2:]):
        raise DTypeError("crops", expected=expected, got=shown(crop))
    for part in parts[2:]:
        require_slice("crops", part)
    return parts


def head_place(head: object, heads: Sequence[int], module: str) -> int:
    """The place of a head among the recorded heads of a module, or `ArgumentError`."""
    if isinstance(head, bool) or not isinstance(head, int) or head not in heads:
        known = ", ".join(map(str, heads))
        raise ArgumentError("head", expected=f"one of {known} in {module}", got=shown(head))
    return list(heads).index(head)


def cut_crop(
    rec: Recorded, picture: SectionPicture, layer: LayerPicture, head: int, place: tuple[int, int], slices: list[slice]
) -> Crop:
    """Exact weights of one head in a record made with ``keep="queries_keys"``.

    `place` is the call and the batch item. `slices` are of queries and keys without padding.
    """
    call, item = place
    queries, keys = (
        range(len(tokens))[part] for tokens, part in zip((picture.queries, picture.keys), slices, strict=True)
    )
    if queries.step != 1 or keys.step != 1:
        raise ArgumentError("crops", expected="slices without a step", got=str(slices))
    rows = range(layer.queries[0] + queries.start, layer.queries[0] + queries.stop)
    columns = slice(layer.keys[0] + keys.start, layer.keys[0] + keys.stop)
    parts = [
        rec.weights(layer.name, head, list(rows[first : first + ROWS_AT_A_TIME]), call)[item, :, columns].float().cpu()
        for first in range(0, len(rows), ROWS_AT_A_TIME)
    ]
    weights = torch.cat(parts) if parts else torch.zeros(0, len(keys))
    entropy = None
    uncut = (len(queries), len(keys)) == (len(picture.queries), len(picture.keys))
    if uncut and (has_pieces(picture.queries) or has_pieces(picture.keys)):
        entropy = row_entropy(merge_words(weights, picture.queries, picture.keys))
    return Crop((queries.start, queries.stop), (keys.start, keys.stop), weights, entropy)
