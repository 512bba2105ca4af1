"""Masks whose rows see a run of columns that moves along with the row, so that much is known without looking."""

from __future__ import annotations

from dataclasses import dataclass

from ._base import Mask
from ._grid import Block, Grid
from ._positional import Causal, Prefix, SlidingWindow

__all__ = ["Band", "band_of"]


@dataclass(frozen=True)
class Band:
    """Row i sees column j where i + low ≤ j ≤ i + high and j < stop.

    Args:
        low: how far from the row's own number the run begins.
        high: how far from it the run ends, itself included.
        stop: one past the last column that any row may see.
    """

    low: int
    high: int
    stop: int

    def meet(self, low: int, high: int, stop: int) -> Band:
        """The columns that both bands show."""
        return Band(max(self.low, low), min(self.high, high), min(self.stop, stop))

    def rows(self, grid: Grid) -> tuple[int, int]:
        """First and one past the last row that sees anything."""
        if self.low > self.high or self.stop <= 0:
            return 0, 0
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

    def outline(self, block: Block) -> tuple[int, ...] | None:
        """Equal for blocks that look the same; ``None`` for chosen rows or columns."""
        if block.ends is None:
            return None
        row, row_stop, column, column_stop = block.ends
        return row - column, row_stop - row, column_stop - column, min(self.stop, column_stop) - column


def band_of(mask: Mask, grid: Grid) -> Band | None:
    """The band a mask is, or ``None`` if it is none or positions do not simply count up."""
    band = Band(-grid.query_length, grid.key_length, grid.key_length)
    for part in mask.parts():
        if isinstance(part, Causal):
            diagonal = part.diagonal(grid)
            if diagonal is None:
                return None
            band = band.meet(band.low, diagonal, band.stop)
        elif isinstance(part, SlidingWindow):
            if grid.shift is None:
                return None
            band = band.meet(grid.shift - part.left, grid.shift + part.right, band.stop)
        elif isinstance(part, Prefix):
            stop = part.stop(grid)
            if stop is None:
                return None
            band = band.meet(band.low, band.high, stop)
        else:
            return None
    return band
