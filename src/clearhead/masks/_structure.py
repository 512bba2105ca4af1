"""The structure of a mask: what is known of it for one grid without evaluating it cell by cell."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._environment import is_tracing, is_transformed
from ._grid import Block, Grid


@dataclass(frozen=True)
class Band:
    """Row i sees column j where i + low ≤ j ≤ i + high and j < stop.

    Args:
        low: first column of a row, relative to the row's number.
        high: its last column, likewise.
        stop: one past the last column that any row may see.
    """

    low: int
    high: int
    stop: int

    @staticmethod
    def whole(grid: Grid) -> Band:
        """The band in which every row sees every column."""
        # Row numbers are below L, so that −L and S are as good as no limit.
        return Band(-grid.query_length, grid.key_length, grid.key_length)

    def meet(self, other: Band) -> Band:
        """The columns that both bands show."""
        return Band(max(self.low, other.low), min(self.high, other.high), min(self.stop, other.stop))

    def rows(self, grid: Grid) -> tuple[int, int]:
        """First and one past the last row that sees anything."""
        if self.low > self.high or self.stop <= 0:
            return 0, 0
        # Row i begins to see where i + high ≥ 0, and sees nothing more where i + low ≥ stop.
        first, stop = max(0, -self.high), min(grid.query_length, self.stop - self.low)
        return (first, stop) if first < stop else (0, 0)

    def columns(self, grid: Grid) -> tuple[int, int]:
        """First and one past the last column that any row sees."""
        if self.low > self.high:
            return 0, 0
        first, stop = max(0, self.low), min(self.stop, grid.query_length + self.high)
        return (first, stop) if first < stop else (0, 0)

    def shows_all(self, grid: Grid) -> bool:
        """Whether every row sees every column."""
        keys = grid.key_length
        return grid.query_length - 1 + self.low <= 0 and self.high >= keys - 1 and self.stop >= keys

    def is_causal(self, grid: Grid) -> bool:
        """Whether it says exactly j ≤ i."""
        # A low limit of 1 − L is still none: the last row, L − 1, reaches column 0.
        return self.high == 0 and self.low <= 1 - grid.query_length and self.stop >= grid.key_length

    def outline(self, block: Block) -> tuple[int, ...] | None:
        """Equal for blocks that look the same; ``None`` for chosen rows or columns."""
        if block.ends is None:
            return None
        row, row_stop, column, column_stop = block.ends
        return row - column, row_stop - row, column_stop - column, min(self.stop, column_stop) - column


@dataclass(frozen=True)
class RowRanges:
    """Each row sees one range of columns; the numbers may lie beyond the grid.

    Args:
        first: first column, integers (1 or B, 1 or L); ``None`` for 0.
        stop: one past the last column, likewise.
    """

    first: Tensor | None
    stop: Tensor

    def meet(self, other: RowRanges) -> RowRanges:
        """The columns that both show."""
        if self.first is None or other.first is None:
            first = other.first if self.first is None else self.first
        else:
            first = torch.maximum(self.first, other.first)
        return RowRanges(first, torch.minimum(self.stop, other.stop))

    def columns(self, grid: Grid, rows: slice) -> tuple[int, int]:
        """First and one past the last column that any of these rows sees; all of them where values cannot be read."""
        # One range for all rows of an item rules no column out block by block, and is not worth reading.
        if self.stop.shape[1] != grid.query_length or rows.start >= rows.stop or is_tracing() or is_transformed():
            return 0, grid.key_length
        first, stop, ordered = self._bounds
        # So it is for documents in order and for causal rows, where long runs need no search.
        if ordered:
            return first[rows.start], stop[rows.stop - 1]
        return min(first[rows]), max(stop[rows])

    @cached_property
    def _bounds(self) -> tuple[list[int], list[int], bool]:
        """Of every row, over all batch items, and whether neither decreases from row to row."""
        # Without items there is nothing to reduce, which `amax` refuses.
        if self.stop.shape[0] == 0:
            return [0] * self.stop.shape[1], [0] * self.stop.shape[1], True
        stop: list[int] = self.stop.amax(0).tolist()
        # Of all items together: a block of rows is computed for the whole batch.
        first: list[int] = [0] * len(stop) if self.first is None else self.first.amin(0).expand(len(stop)).tolist()
        return first, stop, all(a <= b for numbers in (first, stop) for a, b in pairwise(numbers))


@dataclass(frozen=True)
class Structure:
    """A key is visible to a query where all of these allow it; what is absent allows everything.

    Args:
        exact: whether this is all that the mask says. Otherwise it may hide more, and the structure is a bound that
            kernels skip blocks by.
        band: columns relative to the row.
        rows: one range of columns for each row.
        queries: bool (1 or B, L), rows that may see anything.
        keys: bool (1 or B, S), columns that may be seen.
        tensors: bool (1 or B, 1 or H, 1 or L, 1 or S) each.
        biases: floats of such shapes that are added to the scores, −∞ hides.
        either: a key is visible only where one of the two allows it.

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

    def meet(self, other: Structure) -> Structure:
        """The structure of a mask that shows what both show."""
        return Structure(
            self.exact and other.exact,
            other.band if self.band is None else self.band if other.band is None else self.band.meet(other.band),
            other.rows if self.rows is None else self.rows if other.rows is None else self.rows.meet(other.rows),
            both(self.queries, other.queries),
            both(self.keys, other.keys),
            self.tensors + other.tensors,
            self.biases + other.biases,
            # Two alternatives at once would need a list of lists; the bound of one of them is good enough.
            self.either or other.either,
        )

    @property
    def has_tensors(self) -> bool:
        """Whether it says more than a band."""
        marks = self.rows, self.queries, self.keys
        return any(each is not None for each in marks) or bool(self.tensors or self.biases)

    def only_band(self, grid: Grid) -> Band | None:
        """The band that is all the mask says, or ``None`` if it says more."""
        if not self.exact or self.has_tensors:
            return None
        return Band.whole(grid) if self.band is None else self.band

    def marks(self, grid: Grid) -> tuple[Tensor | None, Tensor | None] | None:
        """Bool (1 or B, L) and (1 or B, S): a key is visible where both are true, ``None`` for all of them.

        ``None`` instead of the two if the mask says more. The values of a bias are read: 0 and −∞ are marks.
        """
        # What is here besides marks would need a look at rows and columns together.
        if not self.exact or self.band is not None or self.tensors or len(self.biases) > 1:
            return None
        keys = self.keys
        if self.rows is not None:
            if self.rows.first is not None or self.rows.stop.shape[1] != 1:
                return None
            keys = both(torch.arange(grid.key_length, device=grid.device) < self.rows.stop, keys)
        # An additive mask of 0 and −∞ for each key is a mark, as long as it does not learn.
        for bias in self.biases:
            if bias.requires_grad or not (bias.shape[1] == bias.shape[2] == 1 and bias.shape[3] != 1):
                return None
            seen = bias[:, 0, 0] == 0  # (1 or B, S)
            if not bool((seen | (bias[:, 0, 0] == float("-inf"))).all()):
                return None
            keys = both(seen, keys)
        return self.queries, keys

    def columns(self, grid: Grid, rows: slice) -> tuple[int, int]:
        """A range of columns outside which these rows see nothing."""
        start, stop = 0, grid.key_length
        if self.band is not None:
            start, stop = max(start, rows.start + self.band.low), min(stop, rows.stop + self.band.high, self.band.stop)
        if self.rows is not None:
            first, last = self.rows.columns(grid, rows)
            start, stop = max(start, first), min(stop, last)
        if self.either:
            # What neither alternative shows is hidden; a gap between them is evaluated.
            ranges = [each.columns(grid, rows) for each in self.either]
            start, stop = max(start, min(r[0] for r in ranges)), min(stop, max(r[1] for r in ranges))
        # Limits may have crossed: an empty range, not one of negative length.
        stop = max(0, stop)
        return min(start, stop), stop


#: Of a mask that says nothing of itself: everything may be visible.
UNKNOWN = Structure(exact=False)


def structure_of(mask: Any, grid: Grid) -> Structure:
    """The structure of a mask for a grid, computed once for each call."""
    if is_tracing():
        return mask.structure(grid)
    if mask not in grid.memo:
        grid.memo[mask] = mask.structure(grid)
    return grid.memo[mask]


def both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """What both bool tensors mark; ``None`` marks everything."""
    return other if one is None else one if other is None else one & other
