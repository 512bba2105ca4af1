"""One head out of what was collected, with every weight where that is possible."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._checks import integer
from .._statistics.recorded import Recorded
from ..errors import RecordError
from ._collect import ItemPicture, LayerPicture, SectionPicture, item_places
from ._crops import cut_crop, head_place
from ._labels import layer_labels

#: Longer texts are drawn as tiles: a figure has no more pixels than that.
LONGEST_EXACT = 2048


def head_weights(
    rec: Recorded, picture: SectionPicture, layer: LayerPicture, head: int, item: int
) -> tuple[Tensor, bool]:
    """A head's weights (queries, keys) without padding, or tiles of them, and whether they are single weights."""
    place = head_place(head, layer.heads, layer.name)
    if layer.exact:
        return layer.exact_map[place], True
    if max(len(picture.queries), len(picture.keys)) <= LONGEST_EXACT:
        try:
            crop = cut_crop(rec, picture, layer, head, item_places(rec)[item], [slice(None), slice(None)])
            return crop.weights, True
        except RecordError:
            pass  # queries and keys were not kept; tiles are what there is
    rows, columns = (
        slice(first * tiles // size, -(-last * tiles // size))
        for (first, last), tiles, size in zip((layer.queries, layer.keys), layer.map.shape[1:], layer.size, strict=True)
    )
    return layer.map[place, rows, columns], False


def item_of(items: Sequence[ItemPicture], item: int) -> ItemPicture:
    """One batch item.

    Raises:
        ArgumentError: if it is not there.
    """
    return items[integer("item", item, least=0, most=len(items) - 1, expected=f"0 … {len(items) - 1}")]


def layers_of(rec: Recorded, item: ItemPicture, layer: int | str | None) -> tuple[SectionPicture, list[LayerPicture]]:
    """The section of a layer and the layer; of none the first section and all its layers."""
    if layer is None:
        return item.sections[0], item.sections[0].layers
    name = rec.name_of(layer)
    return next((picture, [found]) for picture in item.sections for found in picture.layers if found.name == name)


def label_of(picture: SectionPicture, layer: LayerPicture) -> str:
    """A layer's number, as pictures write it."""
    names = [found.name for found in picture.layers]
    return layer_labels(names)[names.index(layer.name)]
