"""A mask of a whole attention, seen from a call that computes some of its heads, rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import TypeVar, cast, final

from torch import Tensor

from ..errors import ShapeError
from ._base import Mask
from ._combined import Wrapping
from ._grid import ALL, Block, Grid, Index, Offset, Sizes, take
from ._structure import UNKNOWN, Band, RowRanges, Structure

Result = TypeVar("Result")


def part_of(mask: Mask | None, offset: Offset, whole: Grid | None = None, columns: Tensor | None = None) -> Mask | None:
    """The mask of a call that is a part of a whole attention, exact whatever the mask.

    Args:
        mask: of the whole: what it holds lines up with all of its heads, rows and columns.
        offset: where the call's heads, rows and columns lie in the whole.
        whole: sizes and positions of the whole. Default: those of the call, which has all rows and columns.
        columns: (s,) the call's columns, ascending, where they are no run. Default: a run from the offset's on.

    Returns:
        ``None`` for ``None``, and the mask itself where it is the same for every part.
    """
    if mask is None or (whole is None and mask.fits_any_call):
        return mask
    return PartMask(mask, offset, whole, columns)


@final
class PartMask(Wrapping):
    """See `part_of`. It translates a block's coordinates into those of the whole, and delegates."""

    def __init__(self, mask: Mask, offset: Offset, whole: Grid | None, columns: Tensor | None) -> None:
        super().__init__(mask)
        self._offset, self._whole, self._columns = offset, whole, columns

    def place(self, block: Block) -> Block:
        grid, offset = block.grid, self._offset
        # Absolute positions come with the whole grid; only row, column and head numbers are moved.
        heads = cast(slice, _moved(block.heads, offset.head, grid.num_heads))
        rows = _moved(block.rows, offset.row, grid.query_length)
        chosen = self._columns
        columns = _moved(block.columns, offset.column, grid.key_length) if chosen is None else chosen[block.columns]
        return Block(self._grid(grid), block.batch, heads, rows, columns)

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        return PartMask(self._mask.with_bias_tensors(tensors), self._offset, self._whole, self._columns)

    def tensors(self) -> tuple[Tensor, ...]:
        positions = () if self._whole is None else (self._whole.query_positions, self._whole.key_positions)
        return *self._mask.tensors(), *(each for each in positions if isinstance(each, Tensor))

    def validate(self, grid: Grid) -> None:
        # A tensor of the whole that is cut beyond its end would be cut short in silence.
        whole, offset = self._grid(grid), self._offset
        ends = {
            "H": (offset.head + grid.num_heads, whole.num_heads),
            "L": (offset.row + grid.query_length, whole.query_length),
        }
        if self._columns is None:
            ends["S"] = offset.column + grid.key_length, whole.key_length
        for name, (end, most) in ends.items():
            if end > most:
                expected, got = f"a call within {name} = {most} of the whole", f"one that ends at {end}"
                raise ShapeError("mask", expected=expected, got=got)
        self._mask.validate(whole)

    def sizes(self) -> Sizes:
        # Heads, rows and columns are those of the whole, which do not give the call's.
        return Sizes(self._mask.sizes().batch_size)

    def structure(self, grid: Grid) -> Structure:
        if self._columns is not None:
            return UNKNOWN
        return self._cut(self._mask.structure(self._grid(grid)), grid)

    def signature(self) -> Hashable | None:
        own, whole = self._mask.signature(), self._whole
        if own is None or self._columns is not None:
            return None
        sizes = None if whole is None else (whole.query_length, whole.key_length)
        positions = () if whole is None else (_layout(whole.query_positions), _layout(whole.key_positions))
        return "part", self._offset, sizes, positions, own

    def lowered(self, grid: Grid, key: Hashable, make: Callable[[], Result]) -> Result:
        if self._columns is not None:
            return make()  # they differ from call to call
        where = self._offset, (grid.num_heads, grid.query_length, grid.key_length)
        return self._mask.lowered(self._grid(grid), ("part", key, where), make)

    def parts(self) -> tuple[Mask, ...]:
        parts = self._mask.parts()
        if len(parts) == 1:
            return (self,)
        # Each part moves by itself, and rules that are the same everywhere stay what kernels know.
        found = (part_of(part, self._offset, self._whole, self._columns) for part in parts)
        return tuple(part for part in found if part is not None)

    def _grid(self, grid: Grid) -> Grid:
        """The grid of the whole attention."""
        if self._whole is not None:
            return self._whole
        # Kept with the call's grid, so that what the mask finds out for the whole is found out once. With a memo of its
        # own: what holds for the whole does not hold for the part.
        if self._offset.num_heads not in grid.memo:
            grid.memo[self._offset.num_heads] = replace(grid, num_heads=self._offset.num_heads, memo={})
        return grid.memo[self._offset.num_heads]

    def _cut(self, whole: Structure, grid: Grid) -> Structure:
        """The part of a structure of the whole that is the call's."""
        _, head, row, column, _ = self._offset
        rows, columns = slice(row, row + grid.query_length), slice(column, column + grid.key_length)
        heads = slice(head, head + grid.num_heads)
        block = Block(grid, heads=heads, rows=rows, columns=columns)
        band, ranges = whole.band, whole.rows
        if band is not None:
            # Relative to row numbers: a call that begins further down sees further right, unless it begins there too.
            moved = Band(band.low + row - column, band.high + row - column, max(0, band.stop - column))
            band = Band.whole(grid).meet(moved)
        if ranges is not None:
            first = None if ranges.first is None else take(ranges.first, 1, rows) - column  # (1 or B, 1 or l)
            ranges = RowRanges(first, take(ranges.stop, 1, rows) - column)
        return Structure(
            whole.exact,
            band,
            ranges,
            None if whole.queries is None else take(whole.queries, 1, rows),
            None if whole.keys is None else take(whole.keys, 1, columns),
            tuple(block.cut(tensor) for tensor in whole.tensors),
            tuple(block.cut(bias) for bias in whole.biases),
            tuple(self._cut(each, grid) for each in whole.either),
        )


def _layout(value: Tensor | int | None) -> Hashable:
    return (tuple(value.shape), value.stride()) if isinstance(value, Tensor) else value


def _moved(index: Index, first: int, count: int) -> Index:
    if isinstance(index, Tensor):
        return index + first
    start, stop = (0, count) if index == ALL else (index.start, index.stop)
    return slice(start + first, stop + first)
