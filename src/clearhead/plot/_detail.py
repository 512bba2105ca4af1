"""How closely a page shows what no screen shows whole, so that it stays small at any length."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._collect import ItemPicture, LayerPicture

#: About how many bytes of a deflated stream they take, measured on sentence encoders: a cell of a map, a number of a
#: row, one of the largest weights, a weight of a crop, a token, and what is said of a head.
CELL, ROW, LARGEST, EXACT, TOKEN, HEAD = 0.4, 0.85, 2.2, 0.3, 8, 60
WHOLE_CELL = 1.6  # times as many where a cell has all its levels
WHOLE = 1 << 40


@dataclass(frozen=True)
class Detail:
    """The detail of an item's heads on a page. Chosen heads keep every number of their rows.

    Args:
        side: tiles of a map along each axis, at most.
        bins: entropies, and numbers of what keys receive, at most; neighbouring tokens share one.
        top: largest weights of every query, at most. Where there is none, tiles tell what a query looks at.
        crops: whether chosen heads keep single weights.
    """

    side: int = WHOLE
    bins: int = WHOLE
    top: int = WHOLE
    crops: bool = True

    @property
    def is_coarsest(self) -> bool:
        """Whether there is none below."""
        return self == _LADDER[-1]


#: From fine to coarse; a thumbnail has 56 pixels, a large map about 900.
_LADDER = (
    Detail(),
    Detail(128, 1024, 4),
    Detail(128, 1024, 2),
    Detail(128, 1024, 1),
    Detail(64, 512, 1),
    Detail(128, 512, 0),
    Detail(64, 512, 0),
    Detail(64, 128, 0),
    Detail(32, 128, 0),
    Detail(32, 32, 0),
    Detail(16, 32, 0),
    Detail(16, 16, 0, crops=False),
    Detail(8, 8, 0, crops=False),
)


def details_for(item: ItemPicture, chosen: Collection[tuple[str, int]], room: float) -> Iterator[Detail]:
    """The details that may fit into `room` bytes, the finest first; the coarsest always comes."""
    fitting = [detail for detail in _LADDER[:-1] if _bytes(item, chosen, detail) <= room]
    yield from fitting
    yield _LADDER[-1]


def least_bytes(item: ItemPicture, chosen: Collection[tuple[str, int]]) -> float:
    """About how many bytes an item takes at least."""
    return _bytes(item, chosen, _LADDER[-1])


def bytes_of_crops(item: ItemPicture) -> float:
    """How many bytes the exact weights of an item take at most."""
    layers = [layer for section in item.sections for layer in section.layers]
    return 2.0 * sum(crop.weights.numel() for layer in layers for crop in layer.crops.values())


def pooled_map(layer: LayerPicture, side: int) -> Tensor:
    """A layer's map (H, R, C) with at most `side` rows and columns.

    Rows are averaged over the tokens that are no padding and columns are summed, or the largest is taken, as in the map
    itself: tile ⌊i·R/L⌋ lies in tile ⌊i·r/L⌋ of a coarser map.
    """
    pooled = layer.map
    rows, columns = pooled.shape[1:]
    if rows > side:
        weight = torch.zeros(rows)
        weight.index_add_(0, torch.arange(*layer.queries) * rows // layer.size[0], torch.ones(_length(layer.queries)))
        pooled = _gathered(pooled, side, layer.pooling, weight)
    if columns > side:
        pooled = _gathered(pooled.transpose(1, 2), side, layer.pooling).transpose(1, 2)
    return pooled


def pooled_rows(values: Tensor, bins: int) -> Tensor:
    """Means of neighbours: (H, n) to (H, at most `bins`), number i in bin ⌊i·bins/n⌋."""
    count = values.shape[1]
    if count <= bins:
        return values
    return _gathered(values[..., None], bins, "mass", torch.ones(count))[..., 0]


def _gathered(values: Tensor, size: int, pooling: str, weight: Tensor | None = None) -> Tensor:
    """(H, n, m) to (H, size, m): sums in tiles ⌊i·size/n⌋, or weighted means, or with ``"max"`` the largest."""
    heads, count, width = values.shape
    tiles = torch.arange(count) * size // count
    gathered = values.new_zeros(heads, size, width)
    if pooling == "max":
        return gathered.scatter_reduce_(1, tiles[:, None].expand_as(values), values, "amax")
    if weight is None:
        return gathered.index_add_(1, tiles, values)
    total = torch.zeros(size).index_add_(0, tiles, weight).clamp_(min=1)
    return gathered.index_add_(1, tiles, values * weight[:, None]) / total[:, None]


def _bytes(item: ItemPicture, chosen: Collection[tuple[str, int]], detail: Detail) -> float:
    total = 0.0
    for section in item.sections:
        total += TOKEN * (len(section.queries) + len(section.keys))
        for layer in section.layers:
            total += _bytes_of_layer(layer, [head for name, head in chosen if name == layer.name], detail)
    return total


def _bytes_of_layer(layer: LayerPicture, chosen: list[int], detail: Detail) -> float:
    lengths = [_length(layer.queries), _length(layer.keys)]
    top = layer.indices.shape[2]
    cells = layer.map.shape[1] * layer.map.shape[2]
    shown = min(layer.map.shape[1], detail.side) * min(layer.map.shape[2], detail.side)
    each = CELL * shown * (1 if shown < cells else 2 if layer.exact else WHOLE_CELL)
    each += 2 * ROW * sum(min(length, detail.bins) for length in lengths)
    each += LARGEST * lengths[0] * min(top, detail.top) + HEAD
    of_layer = len(chosen) * (WHOLE_CELL * CELL * cells + 2 * ROW * sum(lengths) + LARGEST * lengths[0] * top)
    exact = EXACT * sum(crop.weights.numel() for crop in layer.crops.values()) if detail.crops else 0
    return each * len(layer.heads) + of_layer + exact


def _length(extent: tuple[int, int]) -> int:
    return extent[1] - extent[0]
