"""A mask of a whole attention, seen from a call that computes some of its heads, rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, cast, final

from torch import Tensor

from ..errors import ShapeError
from ._base import Mask
from ._combined import Wrapping
from ._grid import ALL, Block, Grid, Index, Sizes, take
from ._structure import UNKNOWN, Band, RowRanges, Structure

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """Where the first query and key of a call stand in the whole attention.

    Args:
        query_length, key_length: L and S of the whole.
        first_row, first_column: of the call; or an ascending tensor (s,) of the call's columns, where they are no run.
        query_positions, key_positions: of the whole; as in `Grid`.
    """

    query_length: int
    key_length: int
    first_row: int = 0
    first_column: int | Tensor = 0
    query_positions: Tensor | int | None = None
    key_positions: Tensor | int | None = None


def part_of(mask: Mask | None, num_heads: int, first_head: int = 0, place: Place | None = None) -> Mask | None:
    """The mask of a call that is a part of a whole attention, exact whatever the mask.

    Args:
        mask: of the whole: what it holds lines up with all of its heads, rows and columns.
        num_heads: H of the whole.
        first_head: of the call's heads.
        place: of the call's rows and columns. Default: it has them all.

    Returns:
        ``None`` for ``None``, and the mask itself where it is the same for every part.
    """
    if mask is None or (place is None and mask.fits_any_call):
        return mask
    return PartMask(mask, num_heads, first_head, place)


@final
class PartMask(Wrapping):
    """See `part_of`. Every question about a block is put to the mask as one about the block's place in the whole."""

    def __init__(self, mask: Mask, num_heads: int, first_head: int, place: Place | None) -> None:
        super().__init__(mask)
        self._num_heads, self._first_head, self._place = num_heads, first_head, place

    def place(self, block: Block) -> Block:
        grid = block.grid
        # Absolute positions come with the whole grid; only row, column and head numbers are moved.
        own = self._place_in(grid)
        heads = cast(slice, _moved(block.heads, self._first_head, grid.num_heads))
        rows = _moved(block.rows, own.first_row, grid.query_length)
        first = own.first_column
        columns = first[block.columns] if isinstance(first, Tensor) else _moved(block.columns, first, grid.key_length)
        return Block(self._whole(grid), block.batch, heads, rows, columns)

    def with_bias_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        return PartMask(self._mask.with_bias_tensors(tensors), self._num_heads, self._first_head, self._place)

    def tensors(self) -> tuple[Tensor, ...]:
        place = self._place
        positions = () if place is None else (place.query_positions, place.key_positions)
        return *self._mask.tensors(), *(each for each in positions if isinstance(each, Tensor))

    def validate(self, grid: Grid) -> None:
        # A tensor of the whole that is cut beyond its end would be cut short in silence.
        whole, place = self._whole(grid), self._place_in(grid)
        ends = {
            "H": (self._first_head + grid.num_heads, whole.num_heads),
            "L": (place.first_row + grid.query_length, whole.query_length),
        }
        if not isinstance(place.first_column, Tensor):
            ends["S"] = place.first_column + grid.key_length, whole.key_length
        for name, (end, most) in ends.items():
            if end > most:
                expected, got = f"a call within {name} = {most} of the whole", f"one that ends at {end}"
                raise ShapeError("mask", expected=expected, got=got)
        self._mask.validate(whole)

    def sizes(self) -> Sizes:
        # Heads, rows and columns are those of the whole, which do not give the call's.
        return Sizes(self._mask.sizes().batch_size)

    def structure(self, grid: Grid) -> Structure:
        if self._has_chosen_columns:
            return UNKNOWN
        return self._cut(self._mask.structure(self._whole(grid)), grid)

    def signature(self) -> Hashable | None:
        own, place = self._mask.signature(), self._place
        if own is None or self._has_chosen_columns:
            return None
        numbers = () if place is None else tuple(map(_layout, vars(place).values()))
        return "part", self._num_heads, self._first_head, numbers, own

    def lowered(self, grid: Grid, key: Hashable, make: Callable[[], Result]) -> Result:
        if self._has_chosen_columns:
            return make()  # they differ from call to call
        place = self._place_in(grid)
        sizes = grid.num_heads, grid.query_length, grid.key_length
        where = self._first_head, place.first_row, place.first_column, sizes
        return self._mask.lowered(self._whole(grid), ("part", key, where), make)

    def parts(self) -> tuple[Mask, ...]:
        parts = self._mask.parts()
        if len(parts) == 1:
            return (self,)
        # Each part moves by itself, and rules that are the same everywhere stay what kernels know.
        found = (part_of(part, self._num_heads, self._first_head, self._place) for part in parts)
        return tuple(part for part in found if part is not None)

    @property
    def _has_chosen_columns(self) -> bool:
        return self._place is not None and isinstance(self._place.first_column, Tensor)

    def _place_in(self, grid: Grid) -> Place:
        """Where a call stands; one that has all rows and columns, only not all heads, stands at the first of them."""
        if self._place is not None:
            return self._place
        return Place(grid.query_length, grid.key_length, 0, 0, grid.query_positions, grid.key_positions)

    def _whole(self, grid: Grid) -> Grid:
        """The grid of the whole attention."""
        # Kept with the call's grid, so that what the mask finds out for the whole is found out once.
        key = self._num_heads, self._place and id(self._place)
        if key not in grid.memo:
            place = self._place_in(grid)
            # With a memo of its own: what holds for the whole does not hold for the part.
            grid.memo[key] = replace(
                grid,
                num_heads=self._num_heads,
                query_length=place.query_length,
                key_length=place.key_length,
                query_positions=place.query_positions,
                key_positions=place.key_positions,
                memo={},
            )
        return grid.memo[key]

    def _cut(self, whole: Structure, grid: Grid) -> Structure:
        """The part of a structure of the whole that is the call's."""
        place = self._place_in(grid)
        row, column = place.first_row, cast(int, place.first_column)
        rows, columns = slice(row, row + grid.query_length), slice(column, column + grid.key_length)
        heads = slice(self._first_head, self._first_head + grid.num_heads)
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
