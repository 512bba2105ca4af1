"""The coverage of a mask: the rows that are fully masked, and the keys that are masked for every query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from .._environment import is_tracing, is_transformed
from ._base import Mask
from ._grid import Block, Grid
from ._lowering import chosen_cell, row_blocks
from ._native_coverage import find_natively
from ._structure import Band, RowRanges, Structure, structure_of

_ROWS_AT_A_TIME = 1 << 21  # elements of mask evaluated at once
_EDGE_ROWS, _EDGE_COLUMNS = 16, 8  # at each border, looked at first; reading columns takes longer
_FEW_CELLS = 1 << 16  # up to here looking at everything takes no longer


@dataclass(frozen=True)
class Coverage:
    """Which queries see any key, and which keys any query sees; ``None`` where all do.

    Args:
        queries: bool (1 or B, 1 or H, L, 1).
        keys: bool (1 or B, 1 or H, S, 1).
        masked_queries: the fully masked rows, the opposite of `queries`.
        masked_keys: the keys masked for every query, the opposite of `keys`.
    """

    queries: Tensor | None
    keys: Tensor | None
    masked_queries: Tensor | None = None
    masked_keys: Tensor | None = None

    @staticmethod
    def of(queries: Tensor | None, keys: Tensor | None) -> Coverage:
        """With the opposites."""
        return Coverage(queries, keys, *(None if each is None else ~each for each in (queries, keys)))

    def masked_keys_of(self, num_kv_heads: int) -> Tensor | None:
        """The keys that are masked for every query of every head they serve, (1 or B, 1 or Hkv, S, 1)."""
        masked = self.masked_keys
        if masked is None or masked.shape[1] == 1 or masked.shape[1] == num_kv_heads:
            return masked
        return masked.unflatten(1, (num_kv_heads, -1)).all(2)  # (1 or B, Hkv, S, 1)


COVERS_ALL = Coverage(None, None)


def coverage(mask: Mask, grid: Grid) -> Coverage:
    """The fully masked rows and the keys masked for every query; a prepared mask holds them."""
    return mask.lowered(grid, "coverage", lambda: find_coverage(mask, grid))


def find_coverage(mask: Mask, grid: Grid) -> Coverage:
    """The same, from the structure of the mask where it says it."""
    structure = structure_of(mask, grid)
    band = structure.only_band(grid)
    # Every query sees the first key and the last query all of them, which holds while tracing too.
    if band is not None and band.is_causal(grid) and grid.query_length >= grid.key_length:
        return COVERS_ALL
    # Below, values decide what is looked at, which no graph can hold; and nothing has no borders.
    if is_tracing() or grid.query_length == 0 or grid.key_length == 0:
        return _coverage_at_once(mask, grid)
    if band is not None:
        rows, columns = band.rows(grid), band.columns(grid)
        return Coverage.of(_range(*rows, grid.query_length, grid), _range(*columns, grid.key_length, grid))
    # Ranges and marks are counted, without a look at any cell.
    if structure.exact and not structure.tensors and not structure.biases:
        queries, keys = _coverage_of_ranges(structure, grid)
        return Coverage.of(_unless_all(queries), _unless_all(keys))
    # Tensors are read in one pass by the extension; what has to be computed is left for the search.
    found = find_natively(structure, grid)
    if found is not None:
        return Coverage.of(*(None if seen is None else seen[..., None] for seen in found))
    search = _Search(mask, grid)
    search.run()
    return Coverage.of(_unless_all(search.queries), _unless_all(search.keys))


def _coverage_of_ranges(structure: Structure, grid: Grid) -> tuple[Tensor, Tensor]:
    """Bool (1 or B, 1, L) and (1 or B, 1, S), from first and last column of each row, without a look at any cell."""
    rows, keys = structure.rows, structure.keys
    # One range per item is as good as marks of keys, and takes a few small operators.
    if structure.band is None and (rows is None or (rows.stop.shape[1] == 1 and rows.first is None)):
        if rows is not None:
            keys = _and(torch.arange(grid.key_length, device=grid.device) < rows.stop, keys)
        covered_queries, covered_keys = _of_marks(structure.queries, keys, grid)
    else:
        first, stop = _ends(rows, structure.band or Band.whole(grid), grid)  # (1 or B, L) each
        # Marks of queries go last: a marked query may have an empty range, and the other way round.
        covered_queries = _and(_any_key(first, stop, keys, grid), structure.queries)
        some = _and(stop > first, structure.queries)
        # Ranges begin and end: the running number of those that are open is above zero where a key is seen.
        count = some.long()
        opened = count.new_zeros(len(count), grid.key_length + 1)
        opened.scatter_add_(1, first.expand_as(count), count).scatter_add_(1, stop.expand_as(count), -count)
        covered_keys = _and(opened.cumsum(1)[:, : grid.key_length] > 0, keys)
    return covered_queries[:, None], covered_keys[:, None]  # the heads' dimension


def _of_marks(queries: Tensor | None, keys: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor]:
    """(1 or B, L) and (1 or B, S), where a query sees a key if both are marked."""
    # A query that is marked sees any key at all only if one is marked, and a key is seen likewise.
    every = torch.ones(1, 1, dtype=torch.bool, device=grid.device)
    covered_queries = every if keys is None else keys.any(1, keepdim=True)
    covered_keys = every if queries is None else queries.any(1, keepdim=True)
    covered_queries, covered_keys = _and(covered_queries, queries), _and(covered_keys, keys)
    return covered_queries.expand(-1, grid.query_length), covered_keys.expand(-1, grid.key_length)


def _and(one: Tensor, other: Tensor | None) -> Tensor:
    return one if other is None else one & other


def _ends(rows: RowRanges | None, band: Band, grid: Grid) -> tuple[Tensor, Tensor]:
    """First and one past the last column of each row, within the grid."""
    numbers = torch.arange(grid.query_length, device=grid.device)[None]
    own = RowRanges(numbers + band.low, (numbers + (band.high + 1)).clamp(max=band.stop))
    met = own if rows is None else own.meet(rows)  # (1 or B, L)
    first = numbers if met.first is None else met.first
    return first.clamp(0, grid.key_length), met.stop.clamp(0, grid.key_length)


def _any_key(first: Tensor, stop: Tensor, keys: Tensor | None, grid: Grid) -> Tensor:
    """Whether a column from first to stop is marked, (1 or B, L)."""
    if keys is None:
        return stop > first
    # How many marked keys stand before each column: equal at both ends of a range without any.
    before = F.pad(keys.long().cumsum(1), (1, 0))  # (b, S + 1)
    batch = max(len(before), len(first), len(stop))
    before, first, stop = (each.expand(batch, -1) for each in (before, first, stop))
    return before.gather(1, stop.maximum(first)) > before.gather(1, first)


@final
class _Search:
    """Looks at cells until it is known of every query whether it sees a key, and of every key whether it is seen.

    In most masks a few rows see all the keys between them, and a few columns are seen by all the queries: the borders
    are looked at first, and what they leave open decides which cells are looked at besides.
    """

    def __init__(self, mask: Mask, grid: Grid) -> None:
        self._mask, self._grid, self._structure = mask, grid, structure_of(mask, grid)
        # What is found is as large as the mask differs, between items and heads, and no larger.
        cell = mask.visible(chosen_cell(grid))
        self._outer = (1, 1) if cell is None else (cell.shape[0], cell.shape[1])
        self.queries = torch.zeros(*self._outer, grid.query_length, dtype=torch.bool, device=grid.device)
        self.keys = torch.zeros(*self._outer, grid.key_length, dtype=torch.bool, device=grid.device)

    def run(self) -> None:
        length, keys = self._grid.query_length, self._grid.key_length
        open_rows, open_columns = (0, length), (0, keys)
        # Whether to stop early is read from the outcome, for which an accelerator would have to be waited for.
        if length * keys > _FEW_CELLS and _may_look_at(self.queries):
            self._look_at_borders()
            open_rows, open_columns = _open(self.queries), _open(self.keys)
            if open_rows == open_columns == (0, 0):
                return
        # The budget counts all items and heads that a cell is evaluated for.
        cells = max(1, _ROWS_AT_A_TIME // max(1, self._outer[0] * self._outer[1]))
        for rows, (start, stop) in row_blocks(self._mask, self._grid, cells):
            # Rows that are known to see a key are still looked at for the keys that are open.
            known = rows.stop <= open_rows[0] or rows.start >= open_rows[1]
            if known:
                start, stop = max(start, open_columns[0]), min(stop, open_columns[1])
            self._look(rows, slice(start, stop), for_queries=not known, for_keys=open_columns[1] > 0)

    def _look_at_borders(self) -> None:
        for rows in _edges(self._grid.query_length, _EDGE_ROWS):
            self._look(rows, slice(*self._structure.columns(self._grid, rows)), for_queries=False)
            # Mostly one border settles it, and the other need not be evaluated.
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
    """The first and one past the last number that is not true for all items and heads; (0, 0) if all are."""
    numbers = (~seen).flatten(0, 1).any(0).nonzero()
    return (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)


def _range(start: int, stop: int, length: int, grid: Grid) -> Tensor | None:
    """Bool (1, 1, length, 1), true from start to stop; ``None`` if that is everything."""
    if start == 0 and stop == length:
        return None
    numbers = torch.arange(length, device=grid.device)
    return ((numbers >= start) & (numbers < stop))[None, None, :, None]


def _unless_all(seen: Tensor) -> Tensor | None:
    """(…, n, 1), or ``None`` if all are seen. Read on the CPU alone: an accelerator would have to be waited for."""
    if _may_look_at(seen) and bool(seen.all()):
        return None
    return seen[..., None]


def _may_look_at(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not is_transformed()


def _coverage_at_once(mask: Mask, grid: Grid) -> Coverage:
    # All cells at once, and no value read: a graph of operators alone.
    visible = mask.visible(Block(grid))
    if visible is None:
        return COVERS_ALL
    queries, keys = visible.any(-1), visible.any(-2)  # (1 or B, 1 or H, 1 or L) and (…, 1 or S)
    if queries.shape[-1] != grid.query_length:
        queries = queries.expand(*queries.shape[:-1], grid.query_length)
    if keys.shape[-1] != grid.key_length:
        keys = keys.expand(*keys.shape[:-1], grid.key_length)
    return Coverage.of(queries[..., None], keys[..., None])
