"""A mask as kernels read it: plain numbers and tensors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
from torch import Tensor

from ._bound import BoundMask
from ._grid import Grid
from ._structure import Band, RowRanges, Selection, Structure, joined


class Terms(NamedTuple):
    """A key is visible to a query if every term allows it. An absent term allows all keys.

    Args:
        low, high, stop: key j is visible to query i if i + low ≤ j ≤ i + high and j < stop.
        shift: position of the first query minus position of the first key, for distances.
        first: first visible key of each query, integers (1 or B, 1 or L). It may lie outside the keys.
        last: one past the last one, likewise. It is passed where `first` is, in the same shape.
        keys: visible keys, bool (1 or B, S).
        visible: bool (1 or B, 1 or H, 1 or L, 1 or S).
        bias: added to the scores, floats of such a shape; −∞ hides.
        query_documents: document of each query, int64 (1 or B, L). Both documents are passed, or neither.
        key_documents: of each key, int64 (1 or B, S). A key is visible to the queries of its document.
        slopes: m of ALiBi, float32 (H,): m · |i + shift − j| is subtracted from the scores.
        first_query: no query before it sees the key, int32 (1 or B, S). It spares work and hides nothing.
        last_query: one past the last query that can see the key, likewise.
        selection: the keys that each query lists.
    """

    low: int
    high: int
    stop: int
    shift: int = 0
    first: Tensor | None = None
    last: Tensor | None = None
    keys: Tensor | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    slopes: Tensor | None = None
    first_query: Tensor | None = None
    last_query: Tensor | None = None
    selection: Selection | None = None

    @staticmethod
    def of(structure: Structure, grid: Grid) -> Terms:
        """The terms of a mask that is its structure."""
        band, rows = structure.band or Band.whole(grid), structure.rows
        first, last, visible, bias = None, None, None, None
        if structure.queries is not None:
            unmasked = RowRanges(None, structure.queries * grid.key_length)  # a fully masked row is an empty range
            rows = unmasked if rows is None else rows.meet(unmasked)
        if rows is not None:
            first, last = rows.first, rows.stop
            if first is not None:
                first, last = torch.broadcast_tensors(first, last)
        if structure.tensors:
            visible = reduce(and_, structure.tensors)
        if structure.biases:
            biases = [bias.detach() if bias.requires_grad else bias for bias in structure.biases]
            # A sum in half precision would lose digits.
            bias = biases[0] if len(biases) == 1 else reduce(add, [bias.float() for bias in biases])
        return Terms(band.low, band.high, band.stop, grid.shift or 0, first, last, structure.keys, visible, bias)

    def in_band(self, rows: Tensor, columns: Tensor, grid: Grid) -> list[Tensor]:
        """The conditions of the band that hide something, for numbers of rows and columns."""
        shown: list[Tensor] = []
        if self.low > -grid.query_length:
            shown.append(columns >= rows + self.low)
        if self.high < grid.key_length - 1:
            shown.append(columns <= (rows + self.high if self.high else rows))
        if self.stop < grid.key_length:
            shown.append(columns < self.stop)
        return shown

    def cells(self, grid: Grid) -> Tensor | None:
        """The visible cells, bool (1 or B, 1 or H, 1 or L, 1 or S); ``None`` for all. A bias hides with its own −∞."""
        rows = torch.arange(grid.query_length, device=grid.device).view(1, 1, -1, 1)
        columns = torch.arange(grid.key_length, device=grid.device).view(1, 1, 1, -1)
        shown = self.in_band(rows, columns, grid)
        if self.first is not None:
            shown.append(columns >= self.first[:, None, :, None])
        if self.last is not None:
            shown.append(columns < self.last[:, None, :, None])
        if self.keys is not None:
            shown.append(self.keys[:, None, None])
        if self.query_documents is not None and self.key_documents is not None:
            shown.append(self.query_documents[:, None, :, None] == self.key_documents[:, None, None])
        if self.visible is not None:
            shown.append(self.visible)
        return reduce(and_, shown) if shown else None

    def slopes_as_bias(self, rows: Tensor, count: int) -> Tensor | None:
        """The bias and what the slopes subtract, for these rows (n,) and that many keys, (1 or B, 1 or H, n, S)."""
        if self.slopes is None:
            return self.bias
        distances = (rows[:, None] + self.shift - torch.arange(count, device=rows.device)).abs()
        return joined(self.bias, -self.slopes[None, :, None, None] * distances, add)

    def written(self, grid: Grid) -> Terms:
        """The terms without documents and slopes, for a kernel that reads neither: as a bool tensor and a bias."""
        if self.query_documents is None and self.slopes is None:
            return self
        visible = self.visible
        if self.query_documents is not None and self.key_documents is not None:
            same = self.query_documents[:, None, :, None] == self.key_documents[:, None, None]
            visible = joined(visible, same, and_)
        bias = self.slopes_as_bias(torch.arange(grid.query_length, device=grid.device), grid.key_length)
        return self._replace(visible=visible, bias=bias, query_documents=None, key_documents=None, slopes=None)

    def with_ranges(self) -> Terms:
        """The terms with the range of keys of each document. It hides nothing that the documents do not hide."""
        if self.query_documents is None or self.key_documents is None:
            return self
        first, last = _range_of(self.query_documents, self.key_documents)
        if self.first is not None:
            first = torch.maximum(first, self.first)
        if self.last is not None:
            last = torch.minimum(last, self.last)
        first, last = torch.broadcast_tensors(first, last)
        return self._replace(first=first, last=last)

    def with_all_ranges(self) -> Terms:
        """`with_ranges`, and the range of queries of each document."""
        if self.query_documents is None or self.key_documents is None:
            return self
        first, last = _range_of(self.key_documents, self.query_documents)
        return self.with_ranges()._replace(first_query=first, last_query=last)


def terms_of(bound: BoundMask, gathers: bool = False) -> Terms:
    """The terms of a mask, which all kernels share; selected keys are among them if the kernel `gathers` these."""
    # What was found out of the whole mask is what its parts would give.
    if bound.structure.exact:
        return Terms.of(bound.structure, bound.grid)
    return bound.once(("terms", gathers), lambda: terms_of_parts(bound.parts, bound.grid, gathers))


def terms_of_parts(parts: Iterable[BoundMask], grid: Grid, gathers: bool = False) -> Terms:
    """The terms of masks that must all allow a key, without reading a value. Other masks than terms are evaluated.

    So are selected keys, unless the caller `gathers` them.
    """
    structure, slopes, documents, selection = None, None, None, None
    for part in parts:
        own = part.structure
        if not own.exact:
            if own.slopes is not None and slopes is None:
                slopes = own.slopes()
                continue
            if own.documents is not None and documents is None:
                documents = own.documents
                continue
            if own.selection is not None and selection is None and gathers:
                selection = own.selection
                continue
            own = part.evaluated
        structure = own if structure is None else structure.meet(own)
    terms = Terms.of(structure or Structure(), grid)
    if slopes is not None:
        terms = terms._replace(slopes=slopes)
    if selection is not None:
        terms = terms._replace(selection=selection)
    if documents is None:
        return terms
    of_queries, of_keys = (ids.long().contiguous() for ids in documents)
    return terms._replace(query_documents=of_queries, key_documents=of_keys)


def _range_of(ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For each id (1 or B, n) the first, and one past the last, place of that id in `others` (1 or B, m)."""
    count = others.shape[1]
    if count == 0:
        empty = torch.zeros_like(ids, dtype=torch.int32)
        return empty, empty
    ordered, places = others.sort(dim=1, stable=True)
    left = torch.searchsorted(ordered, ids)
    right = torch.searchsorted(ordered, ids, right=True)
    first = places.gather(1, left.clamp(max=count - 1))
    last = places.gather(1, (right - 1).clamp(min=0)) + 1
    return first.int(), torch.where(right > left, last, first).int()
