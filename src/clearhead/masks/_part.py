"""The mask of a call that computes some heads, rows and columns of a larger attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar, cast, final

import torch
from torch import Tensor

from ..errors import ShapeError
from ._base import Mask
from ._bound import BoundMask, bind
from ._combined import Wrapping
from ._grid import Block, Grid, Index, Offset, Sizes, ends_of, take
from ._structure import UNKNOWN, Band, RowRanges, Structure, joined

Columns = range | Tensor
Number = TypeVar("Number", int, Tensor)


def part_of(mask: Mask | BoundMask | None, offset: Offset, columns: Columns | None = None) -> Mask | None:
    """The mask of a call that is a part of a larger attention.

    Args:
        mask: of the larger attention; its tensors line up with all heads, rows and columns. Bound to the sizes and
            positions of the larger attention, or a mask, whose larger attention has the rows, columns and positions of
            the call.
        offset: the place of the call in the larger attention.
        columns: the call's columns, ascending: a range, or (s,). Default: consecutive columns from the offset's column
            on. Columns in a tensor have no structure, because their values are not read.

    Returns:
        ``None`` for ``None``, and the mask itself if it is the same for every part.
    """
    if isinstance(mask, BoundMask):
        return None if mask.mask is None else PartMask(mask.mask, offset, mask, columns)
    return mask if mask is None or mask.has_no_sizes else PartMask(mask, offset, None, columns)


@final
class PartMask(Wrapping):
    """See `part_of`. It translates block coordinates, then delegates."""

    def __init__(self, mask: Mask, offset: Offset, whole: BoundMask | None, columns: Columns | None) -> None:
        super().__init__(mask)
        self._offset, self._whole, self._columns = offset, whole, columns

    def inner_block(self, block: Block) -> Block:
        grid, offset = block.grid, self._offset
        # The larger grid has the absolute positions; only head, row and column numbers move.
        heads = cast(slice, _in_larger(block.heads, offset.head, grid.num_heads))
        rows = _in_larger(block.rows, offset.row, grid.query_length)
        if self._columns is None:
            columns = _in_larger(block.columns, offset.column, grid.key_length)
        else:
            columns = _taken(self._columns, block.columns, grid.device)
        return Block(self._grid(grid), block.batch, heads, rows, columns)

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        mask, whole = self._mask.with_bias_tensors(tensors), self._whole
        if mask is self._mask:
            return self
        return PartMask(mask, self._offset, None if whole is None else bind(mask, whole.grid), self._columns)

    def tensors(self) -> tuple[Tensor, ...]:
        whole = self._whole
        positions = () if whole is None else (whole.grid.query_positions, whole.grid.key_positions)
        return *self._mask.tensors(), *(tensor for tensor in positions if isinstance(tensor, Tensor))

    def validate(self, grid: Grid) -> None:
        # Slicing beyond the end of a tensor would silently return fewer rows.
        full_grid, offset = self._grid(grid), self._offset
        ends = {
            "H": (offset.head + grid.num_heads, full_grid.num_heads),
            "L": (offset.row + grid.query_length, full_grid.query_length),
        }
        if self._columns is None:
            ends["S"] = offset.column + grid.key_length, full_grid.key_length
        for name, (end, most) in ends.items():
            if end > most:
                expected, got = f"a call within {name} = {most} of the whole", f"one that ends at {end}"
                raise ShapeError("mask", expected=expected, got=got)
        self._mask.validate(full_grid)

    def sizes(self) -> Sizes:
        # Heads, rows and columns of the larger attention do not determine those of the call.
        return Sizes(self._mask.sizes().batch_size)

    def structure(self, grid: Grid) -> Structure:
        if isinstance(self._columns, Tensor):
            return UNKNOWN
        return self._cut(self._bound_whole(grid).structure, grid)

    def _kept(self, grid: Grid) -> BoundMask | None:
        if self._columns is not None or not grid.has_values:  # these columns differ between calls
            return None
        whole = self._bound_whole(grid)
        if not whole.is_kept:
            return None
        # A part of the mask alone: what is kept does not hold what keeps it.
        alone = None if self._whole is None else BoundMask(whole.mask, whole.grid)
        part = PartMask(cast(Mask, whole.mask), self._offset, alone, None)
        place = "part", self._offset, grid.num_heads, grid.query_length, grid.key_length
        return whole.once(place, lambda: BoundMask(part, grid, is_kept=True))

    def parts(self) -> tuple[Mask, ...]:
        masks = self._mask.parts()
        if len(masks) == 1:
            return (self,)
        # Each part moves separately, so rules that fit every call keep their class and structure.
        parts = masks if self._whole is None else self._whole.parts
        cut = (part_of(part, self._offset, self._columns) for part in parts)
        return tuple(part for part in cut if part is not None)

    def _grid(self, grid: Grid) -> Grid:
        """The grid of the larger attention."""
        return replace(grid, num_heads=self._offset.num_heads) if self._whole is None else self._whole.grid

    def _bound_whole(self, grid: Grid) -> BoundMask:
        """The mask of the larger attention on its grid."""
        return bind(self._mask, self._grid(grid)) if self._whole is None else self._whole

    def _chosen(self, grid: Grid) -> range:
        """The columns of the larger attention, which are no tensor."""
        column = self._offset.column
        return range(column, column + grid.key_length) if self._columns is None else cast(range, self._columns)

    def _slices(self, grid: Grid) -> tuple[slice, slice]:
        """The rows and the columns of the larger attention, which are no tensor."""
        row, chosen = self._offset.row, self._chosen(grid)
        return slice(row, row + grid.query_length), slice(chosen.start, chosen.stop, chosen.step)

    def _cut(self, structure: Structure, grid: Grid) -> Structure:
        """The call's part of a structure of the larger attention."""
        head, row, chosen = self._offset.head, self._offset.row, self._chosen(grid)
        rows, columns = self._slices(grid)
        heads = slice(head, head + grid.num_heads)
        block = Block(grid, heads=heads, rows=rows, columns=columns)
        band, ranges, documents = structure.band, structure.rows, structure.documents
        if ranges is not None:
            first = None if ranges.first is None else _count_before(take(ranges.first, 1, rows), chosen)
            ranges = RowRanges(first, _count_before(take(ranges.stop, 1, rows), chosen))  # (1 or B, 1 or l) each
        if band is not None:
            band, of_band = _cut_band(band, grid, row, chosen)
            ranges = joined(ranges, of_band, RowRanges.meet)
        return Structure(
            structure.exact,
            band,
            ranges,
            None if structure.queries is None else take(structure.queries, 1, rows),
            None if structure.keys is None else take(structure.keys, 1, columns),
            tuple(block.cut(tensor) for tensor in structure.tensors),
            tuple(block.cut(bias) for bias in structure.biases),
            tuple(self._cut(alternative, grid) for alternative in structure.either),
            documents=documents and (documents[0][:, rows], documents[1][:, columns]),
            per_head=structure.per_head,
        )


def _cut_band(band: Band, grid: Grid, row: int, columns: range) -> tuple[Band, RowRanges | None]:
    """A band of the larger attention as a band of the call, or as a range of each row where columns are left out."""
    every_column, stop = Band.whole(grid), max(0, _count_before(band.stop, columns))
    if columns.step == 1 or grid.query_length == 1:
        # The band is relative to row numbers: the row offset moves it right, and the first column moves it left.
        low, high = _count_before(band.low + row, columns), _count_before(band.high + row + 1, columns) - 1
        return every_column.meet(Band(low, high, stop)), None
    rows = torch.arange(row, row + grid.query_length, device=grid.device)[None]
    first = None if band.low + row + grid.query_length <= columns.start + 1 else _count_before(rows + band.low, columns)
    limited = every_column.meet(Band(every_column.low, every_column.high, stop))
    return limited, RowRanges(first, _count_before(rows + (band.high + 1), columns))


def _count_before(column: Number, columns: range) -> Number:
    """The number of chosen columns before a column, as if they continued at both ends."""
    return -((columns.start - column) // columns.step)


def _taken(columns: Columns, index: Index, device: torch.device) -> Tensor:
    """Some of the chosen columns, as numbers of the larger attention."""
    if isinstance(columns, Tensor):
        return columns[index]
    if isinstance(index, Tensor):
        return index * columns.step + columns.start
    some = columns[index]
    return torch.arange(some.start, some.stop, some.step, device=device)


def _in_larger(index: Index, first: int, count: int) -> Index:
    """Some of `count` heads, rows or columns, as numbers of the larger attention, where they begin at `first`."""
    if isinstance(index, Tensor):
        return index + first
    start, stop = ends_of(index, count)
    return slice(start + first, stop + first)
