"""Who takes part at all: the queries that see a key, and the keys that some query sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from .._environment import is_tracing, is_transformed
from ._band import band_of
from ._base import Mask
from ._grid import Block, Grid
from ._lowering import chosen_cell, is_plain_causal, row_blocks
from ._native_reach import find_natively

__all__ = ["Reach", "reach"]

_ROWS_AT_A_TIME = 1 << 21  # elements of mask evaluated at once
_EDGE_ROWS, _EDGE_COLUMNS = 16, 8  # at each border, looked at first; reading columns takes longer
_FEW_CELLS = 1 << 16  # up to here looking at everything takes no longer


@dataclass(frozen=True)
class Reach:
    """Which queries see any key, and which keys any query sees; ``None`` where all do.

    Args:
        queries: bool (1 or B, 1 or H, L, 1).
        keys: bool (1 or B, 1 or H, S, 1).
    """

    queries: Tensor | None
    keys: Tensor | None


def reach(mask: Mask, grid: Grid) -> Reach:
    """Find the queries that see nothing and the keys that nobody sees, in blocks of rows and of what they can see."""
    if is_plain_causal(mask, grid) and grid.query_length >= grid.key_length:
        return Reach(None, None)
    if is_tracing() or grid.query_length == 0 or grid.key_length == 0:
        return _reach_at_once(mask, grid)
    band = band_of(mask, grid)
    if band is None:
        found = find_natively(mask, grid)
        if found is not None:
            return Reach(*(None if seen is None else seen[..., None] for seen in found))
        search = _Search(mask, grid)
        search.run()
        return Reach(_unless_all(search.queries), _unless_all(search.keys))
    rows, columns = band.rows(grid), band.columns(grid)
    return Reach(_run(*rows, grid.query_length, grid), _run(*columns, grid.key_length, grid))


@final
class _Search:
    """Looks at cells until it is known of every query whether it sees a key, and of every key whether it is seen.

    In most masks a few rows see all the keys between them, and a few columns are seen by all the queries: the borders
    are looked at first, and what they leave open decides which cells are looked at besides.
    """

    def __init__(self, mask: Mask, grid: Grid) -> None:
        self._mask, self._grid = mask, grid
        cell = mask.visible(chosen_cell(grid))
        self._outer = (1, 1) if cell is None else (cell.shape[0], cell.shape[1])
        self.queries = torch.zeros(*self._outer, grid.query_length, dtype=torch.bool, device=grid.device)
        self.keys = torch.zeros(*self._outer, grid.key_length, dtype=torch.bool, device=grid.device)

    def run(self) -> None:
        length, keys = self._grid.query_length, self._grid.key_length
        open_rows, open_columns = (0, length), (0, keys)
        if length * keys > _FEW_CELLS and _may_look_at(self.queries):
            self._look_at_borders()
            open_rows, open_columns = _open(self.queries), _open(self.keys)
            if open_rows == open_columns == (0, 0):
                return
        cells = max(1, _ROWS_AT_A_TIME // max(1, self._outer[0] * self._outer[1]))
        for rows, (start, stop) in row_blocks(self._mask, self._grid, cells):
            known = rows.stop <= open_rows[0] or rows.start >= open_rows[1]
            if known:
                start, stop = max(start, open_columns[0]), min(stop, open_columns[1])
            self._look(rows, slice(start, stop), for_queries=not known, for_keys=open_columns[1] > 0)

    def _look_at_borders(self) -> None:
        for rows in _edges(self._grid.query_length, _EDGE_ROWS):
            self._look(rows, slice(*self._mask.key_span(self._grid, rows)), for_queries=False)
            if bool(self.keys.all()):
                break
        for columns in _edges(self._grid.key_length, _EDGE_COLUMNS):
            self._look(slice(0, self._grid.query_length), columns, for_keys=False)
            if bool(self.queries.all()):
                break

    def _look(self, rows: slice, columns: slice, *, for_queries: bool = True, for_keys: bool = True) -> None:
        if columns.start >= columns.stop:
            return
        visible = self._mask.visible(Block(self._grid, rows=rows, columns=columns))
        if for_queries:
            self.queries[..., rows] |= True if visible is None else visible.any(-1)
        if for_keys:
            self.keys[..., columns] |= True if visible is None else visible.any(-2)


def _edges(length: int, width: int) -> tuple[slice, slice]:
    return slice(0, min(width, length)), slice(max(0, length - width), length)


def _open(seen: Tensor) -> tuple[int, int]:
    """The first and one past the last place that is not true for all items and heads; (0, 0) if all are."""
    places = (~seen).flatten(0, 1).any(0).nonzero()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _run(start: int, stop: int, length: int, grid: Grid) -> Tensor | None:
    """Bool (1, 1, length, 1), true from start to stop; ``None`` if that is everything."""
    if start == 0 and stop == length:
        return None
    places = torch.arange(length, device=grid.device)
    return ((places >= start) & (places < stop))[None, None, :, None]


def _unless_all(seen: Tensor) -> Tensor | None:
    """(…, n, 1), or ``None`` if all are seen. An accelerator would have to be waited for, so only the CPU is asked."""
    if _may_look_at(seen) and bool(seen.all()):
        return None
    return seen[..., None]


def _may_look_at(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not is_transformed()


def _reach_at_once(mask: Mask, grid: Grid) -> Reach:
    visible = mask.visible(Block(grid))
    if visible is None:
        return Reach(None, None)
    queries, keys = visible.any(-1), visible.any(-2)
    if queries.shape[-1] != grid.query_length:
        queries = queries.expand(*queries.shape[:-1], grid.query_length)
    if keys.shape[-1] != grid.key_length:
        keys = keys.expand(*keys.shape[:-1], grid.key_length)
    return Reach(queries[..., None], keys[..., None])
