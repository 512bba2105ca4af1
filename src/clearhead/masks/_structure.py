"""The structure of a mask: the facts about it on one grid that need no evaluation of cells."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from operator import and_
from typing import NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from .._checks import PLAIN
from ._grid import Block, Grid

Item = TypeVar("Item")

_STRIDED = torch.strided


@overload
def joined(left: Item, right: Item | None, join: Callable[[Item, Item], Item]) -> Item: ...
@overload
def joined(left: Item | None, right: Item | None, join: Callable[[Item, Item], Item]) -> Item | None: ...
def joined(left: Item | None, right: Item | None, join: Callable[[Item, Item], Item]) -> Item | None:
    """Both joined, or the only one that is not ``None``."""
    return right if left is None else left if right is None else join(left, right)


class Band(NamedTuple):
    """Column j is visible to row i if i + low ≤ j ≤ i + high and j < stop.

    Args:
        low: first column of a row, relative to the row's number.
        high: last column of a row, relative to the row's number.
        stop: one past the last column that is visible to any row.
    """

    low: int
    high: int
    stop: int

    @staticmethod
    def whole(grid: Grid) -> Band:
        """The band in which every column is visible to every row."""
        # Row numbers are below L, so −L and S limit nothing.
        return Band(-grid.query_length, grid.key_length, grid.key_length)

    def meet(self, other: Band) -> Band:
        """The columns that are in both bands."""
        return Band(max(self.low, other.low), min(self.high, other.high), min(self.stop, other.stop))

    def rows(self, grid: Grid) -> tuple[int, int]:
        """First and one past the last row with visible columns."""
        if self.low > self.high or self.stop <= 0:
            return 0, 0
        # Row i has visible columns if i + high ≥ 0 and i + low < stop.
        first, stop = max(0, -self.high), min(grid.query_length, self.stop - self.low)
        return (first, stop) if first < stop else (0, 0)

    def columns(self, grid: Grid) -> tuple[int, int]:
        """First and one past the last column that is visible to any row."""
        if self.low > self.high:
            return 0, 0
        first, stop = max(0, self.low), min(self.stop, grid.query_length + self.high)
        return (first, stop) if first < stop else (0, 0)

    def shows_all(self, grid: Grid) -> bool:
        """Whether every column is visible to every row."""
        keys = grid.key_length
        return grid.query_length - 1 + self.low <= 0 and self.high >= keys - 1 and self.stop >= keys

    def is_causal(self, grid: Grid) -> bool:
        """Whether the band is exactly j ≤ i."""
        # At low = 1 − L, column 0 is still visible to the last row, L − 1.
        return self.high == 0 and self.low <= 1 - grid.query_length and self.stop >= grid.key_length

    def outline(self, block: Block) -> tuple[int, ...] | None:
        """Equal for blocks with the same visible cells; ``None`` for index tensors."""
        if block.ends is None:
            return None
        row, row_stop, column, column_stop = block.ends
        return row - column, row_stop - row, column_stop - column, min(self.stop, column_stop) - column


@dataclass(eq=False)  # not frozen, which would take each call of lengths a microsecond
class RowRanges:
    """One range of visible columns for each row. It may extend beyond the grid.

    Args:
        first: first column, integers (1 or B, 1 or L); ``None`` for 0.
        stop: one past the last column, of the same shapes.
        shortest: the number of columns that every range is known to have.
        known: `stop`, if it lies on the CPU too.
    """

    first: Tensor | None
    stop: Tensor
    shortest: int = 0
    known: Tensor | None = None

    def meet(self, other: RowRanges) -> RowRanges:
        """The columns that are in both ranges."""
        known = None if self.known is None or other.known is None else torch.minimum(self.known, other.known)
        first, stop = joined(self.first, other.first, torch.maximum), torch.minimum(self.stop, other.stop)
        return RowRanges(first, stop, known=known)

    def columns(self, grid: Grid, rows: slice) -> tuple[int, int]:
        """First and one past the last column that is visible to these rows; all columns if values are not read."""
        # If all rows of an item have one range, every block has the same columns, and reading it saves nothing.
        if self.stop.shape[1] != grid.query_length or rows.start >= rows.stop:
            return 0, grid.key_length
        if not self.stop.is_cpu or not grid.has_values:  # an accelerator would be waited for
            return 0, grid.key_length
        first, stop, ordered = self._bounds
        # Packed sequences in order and causal rows need no search.
        if ordered:
            return first[rows.start], stop[rows.stop - 1]
        return min(first[rows]), max(stop[rows])

    @cached_property
    def _bounds(self) -> tuple[list[int], list[int], bool]:
        """First and stop of every row over all batch items, and whether neither decreases from row to row."""
        # `amax` refuses an empty dimension.
        if self.stop.shape[0] == 0:
            return [0] * self.stop.shape[1], [0] * self.stop.shape[1], True
        stop: list[int] = self.stop.amax(0).tolist()
        # A block of rows is computed for all items at once.
        first: list[int] = [0] * len(stop) if self.first is None else self.first.amin(0).expand(len(stop)).tolist()
        return first, stop, all(a <= b for numbers in (first, stop) for a, b in pairwise(numbers))


class Selection(NamedTuple):
    """The keys that each query lists.

    Args:
        indices: int32 or int64 (1 or B, heads, L, k), numbers of blocks; −1 is none. The heads divide H.
        block: keys of a block.
    """

    indices: Tensor
    block: int


@dataclass(slots=True)
class Structure:
    """A key is visible to a query if every field allows it. An absent field allows all keys.

    Args:
        exact: whether the mask hides nothing else. Otherwise the structure is a bound, by which kernels skip blocks.
        band: columns relative to the row.
        rows: one range of columns for each row.
        queries: bool (1 or B, L), false in fully masked rows.
        keys: bool (1 or B, S), false for keys masked for every query.
        tensors: bool (1 or B, 1 or H, 1 or L, 1 or S) each.
        biases: floats of such shapes that are added to the scores; −∞ hides.
        either: one of the two structures must allow the key. If both are exact, the mask is these two.
        diagonal: whether key i is known to be visible to query i, for every i that both L and S exceed.
        keyed: whether `keys` is known to have a visible key in every batch item.
        documents: ids of the queries (1 or B, L) and of the keys (1 or B, S). The mask shows equal ones, whether or not
            the other fields are exact. That of masks combined with ``&`` has none, and no slopes.
        slopes: makes the slopes m (H,) of a mask that is no more than the bias −m · |distance|.
        selection: the keys of a mask that is no more than these. Like documents and slopes it is lost with ``&``.
        query_counts: how many first queries of each item `queries` marks, (1 or B,) on the CPU, if it marks no others.
        per_head: whether a mask that is not exact differs between heads; ``None`` if only an evaluation shows it.

    Example:
        >>> import torch
        >>> from clearhead import masks
        >>> from clearhead.masks._grid import Grid
        >>> masks.causal().structure(Grid(1, 1, 3, 5, torch.device("cpu"))).band
        Band(low=-3, high=0, stop=5)
    """

    exact: bool = True
    band: Band | None = None
    rows: RowRanges | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    tensors: tuple[Tensor, ...] = ()
    biases: tuple[Tensor, ...] = ()
    either: tuple[Structure, ...] = ()
    diagonal: bool = False
    keyed: bool = False
    documents: tuple[Tensor, Tensor] | None = None
    slopes: Callable[[], Tensor] | None = None
    selection: Selection | None = None
    query_counts: Tensor | None = None
    per_head: bool | None = None

    def meet(self, other: Structure) -> Structure:
        """The structure of the two masks combined with ``&``."""
        counts = self.query_counts if other.queries is None else None
        return Structure(
            self.exact and other.exact,
            joined(self.band, other.band, Band.meet),
            joined(self.rows, other.rows, RowRanges.meet),
            joined(self.queries, other.queries, and_),
            joined(self.keys, other.keys, and_),
            self.tensors + other.tensors,
            self.biases + other.biases,
            # Only one pair of alternatives is stored, which is still a bound.
            self.either or other.either,
            self.diagonal and other.diagonal,
            (self.keyed and other.keys is None) or (other.keyed and self.keys is None),
            query_counts=other.query_counts if self.queries is None else counts,
            per_head=self.per_head if self.per_head is other.per_head else None,
        )

    def layout(self, sized: bool) -> Hashable | None:
        """What a plan depends on: the layouts of its tensors and, if `sized`, the numbers of its band.

        ``None`` with tensors whose values may be others than those in memory.
        """
        rows, selection, others = self.rows, self.selection, ()
        tensors: list[Tensor | None] = [self.queries, self.keys, *self.tensors, *self.biases]
        if rows is not None:
            tensors += rows.first, rows.stop
        if not self.exact:
            tensors += (*(self.documents or (None, None)), None if selection is None else selection.indices)
            either = tuple([each.layout(sized) for each in self.either])
            if None in either:
                return None
            others = self.slopes is None, None if selection is None else selection.block, either
        layouts = tuple(
            [
                # A device takes longer to compare than a bool.
                None if x is None else (x.shape, x.stride(), x.dtype, x.is_cpu or x.device, x.requires_grad)
                for x in tensors
                if x is None or (type(x) in PLAIN and x.layout is _STRIDED and not x.is_neg())
            ]
        )
        if len(layouts) < len(tensors):
            return None
        return self.exact, self.band if sized else self.band is None, rows is None, len(self.tensors), layouts, others

    @property
    def differs(self) -> bool | None:
        """Whether the mask differs between heads; ``None`` if only an evaluation shows it."""
        by_tensors = any(tensor.shape[1] > 1 for tensor in (*self.tensors, *self.biases))
        return by_tensors if by_tensors or self.exact else self.per_head

    def run(self, grid: Grid) -> tuple[Tensor | None, Tensor] | None:
        """The one run of keys that it shows to each query; ``None`` if it is no run, or not exact.

        Returns:
            The first key, ``None`` for 0, and one past the last key, integers (1 or B, L) each. They may lie outside
            the keys.
        """
        if not self.exact or self.queries is not None or self.keys is not None or self.tensors or self.biases:
            return None
        band, queries = self.band or Band.whole(grid), torch.arange(grid.query_length, device=grid.device)[None]
        first, last = None, (queries + (band.high + 1)).clamp(max=band.stop)
        if band.low > 1 - grid.query_length:
            first = queries + band.low
        if self.rows is not None:
            first, last = joined(first, self.rows.first, torch.maximum), torch.minimum(last, self.rows.stop)
        return first, last

    def columns(self, grid: Grid, rows: slice) -> tuple[int, int]:
        """A range that contains all columns that are visible to these rows."""
        start, stop = 0, grid.key_length
        if self.band is not None:
            start, stop = max(start, rows.start + self.band.low), min(stop, rows.stop + self.band.high, self.band.stop)
        if self.rows is not None:
            first, last = self.rows.columns(grid, rows)
            start, stop = max(start, first), min(stop, last)
        if self.either:
            # From the first column of either alternative to the last one; a gap between them is evaluated.
            ranges = [alternative.columns(grid, rows) for alternative in self.either]
            start, stop = max(start, min(r[0] for r in ranges)), min(stop, max(r[1] for r in ranges))
        # If the limits crossed, the range is empty.
        stop = max(0, stop)
        return min(start, stop), stop


#: The structure of a mask without known facts: every key may be visible.
UNKNOWN = Structure(exact=False)


def unknown_at(grid: Grid) -> Structure:
    """`UNKNOWN` for a rule about positions, which differs between heads only if positions do."""
    keys = grid.key_positions
    return Structure(exact=False, per_head=isinstance(keys, Tensor) and keys.dim() == 3)


def met(structures: Sequence[Structure]) -> Structure:
    """The structure of masks combined with ``&``."""
    first, *others = structures or (Structure(diagonal=True),)
    # Alone it meets one that hides nothing, because the result has no documents and no slopes.
    return reduce(Structure.meet, others or (Structure(diagonal=True),), first)
