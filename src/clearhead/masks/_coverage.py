"""The coverage of a mask: the fully masked rows, and the keys masked for every query."""

from __future__ import annotations

from dataclasses import dataclass
from operator import and_
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .._native.coverage import find_coverage
from ._bound import BoundMask
from ._grid import Block, Grid
from ._listed import listed_columns, shown_cells
from ._lowering import row_blocks
from ._structure import Band, RowRanges, Selection, Structure, joined

_ROWS_AT_A_TIME = 1 << 21  # elements of the mask that are evaluated at once
_EDGE_ROWS, _EDGE_COLUMNS = 16, 8  # evaluated first at each border; columns take longer to read
_CELLS_AT_ONCE = 1 << 28  # bools on an accelerator
_FEW_CELLS = 1 << 16  # up to this size, evaluating all cells takes no longer


@dataclass(frozen=True)
class Coverage:
    """The queries with a visible key, and the keys that are visible to a query; ``None`` for all.

    Args:
        queries: bool (1 or B, 1 or H, 1 or L, 1).
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
        """The coverage with its opposites."""
        return Coverage(queries, keys, *(None if covered is None else ~covered for covered in (queries, keys)))

    def masked_keys_of(self, num_kv_heads: int) -> Tensor | None:
        """The keys that are masked for every query of every head they serve, (1 or B, 1 or Hkv, S, 1)."""
        masked = self.masked_keys
        if masked is None or masked.shape[1] == 1 or masked.shape[1] == num_kv_heads:
            return masked
        return masked.unflatten(1, (num_kv_heads, -1)).all(2)  # (1 or B, Hkv, S, 1)


COVERS_ALL = Coverage(None, None)


def coverage(bound: BoundMask) -> Coverage:
    """The fully masked rows and the keys masked for every query, computed once."""
    return COVERS_ALL if bound.mask is None else bound.once("covered", lambda: _find_coverage(bound))


def _find_coverage(bound: BoundMask) -> Coverage:
    structure, band, grid = bound.structure, bound.band, bound.grid
    # The first key is visible to all queries, and all keys to the last query. This holds while tracing too.
    if band is not None and band.is_causal(grid) and grid.query_length >= grid.key_length:
        return COVERS_ALL
    # The other cases read values, or borders, which an empty mask lacks.
    if not grid.has_values or grid.is_empty:
        return _coverage_at_once(bound)
    if structure.diagonal and grid.query_length == grid.key_length:
        return COVERS_ALL
    if band is not None:
        queries = _marks_between(*band.rows(grid), grid.query_length, grid)
        keys = _marks_between(*band.columns(grid), grid.key_length, grid)
        return Coverage.of(queries, keys)
    # Ranges and marks need no evaluation of cells.
    if structure.exact and not structure.tensors and not structure.biases:
        queries, keys = _coverage_of_ranges(structure, grid)
        return Coverage.of(None if queries is None else _unless_all(queries), _unless_all(keys))
    if bound.selection is not None:
        return Coverage.of(*map(_unless_all, _coverage_of_lists(bound)))
    # An accelerator would wait for a search, and has the memory and the speed for all cells of one pass.
    if grid.device.type != "cpu" and grid.batch_size * grid.query_length * grid.key_length <= _CELLS_AT_ONCE:
        return _coverage_at_once(bound)
    # The extension reads stored tensors in one pass. Computed masks are searched.
    limits = structure.band or Band.whole(grid)
    ends = limits.low, limits.high, limits.stop
    covered = find_coverage(_tensors(structure), grid.query_length, grid.key_length, ends)
    if covered is not None:
        return Coverage.of(*(None if of_axis is None else of_axis[..., None] for of_axis in covered))
    return Coverage.of(*map(_unless_all, _search(bound)))


def _coverage_of_ranges(structure: Structure, grid: Grid) -> tuple[Tensor | None, Tensor]:
    """Bool (1 or B, 1, 1 or L), ``None`` for all, and (1 or B, 1, S), from the first and last column of each row."""
    rows, keys, band = structure.rows, structure.keys, structure.band
    # One range per item equals marks of keys, which take few small operators.
    is_marks = rows is None or (rows.stop.shape[1] == 1 and rows.first is None)
    if band is not None:
        is_square_causal = band.is_causal(grid) and grid.query_length == grid.key_length
        is_marks = is_marks and is_square_causal and structure.queries is None
    if is_marks:
        # Whether every query is known to see a key.
        sees_key = structure.keyed and rows is None and band is None
        if rows is not None:
            sees_key = keys is None and rows.shortest > 0
            keys = joined(torch.arange(grid.key_length, device=grid.device) < rows.stop, keys, and_)
        if sees_key and keys is not None and structure.queries is None:
            return None, keys[:, None]
        if band is None or keys is None:
            covered_queries, covered_keys = _of_marks(structure.queries, keys, grid)
        else:  # a marked key is visible to its own query, and to all later ones
            covered_queries, covered_keys = keys.cumsum(1) > 0, keys
    else:
        first, stop = _ends(rows, structure.band or Band.whole(grid), grid)  # (1 or B, L) each
        covered_queries = joined(_any_key(first, stop, keys, grid), structure.queries, and_)
        # A key is covered if more ranges begin than end up to it.
        ranges = joined(stop > first, structure.queries, and_).long()
        changes = ranges.new_zeros(len(ranges), grid.key_length + 1)
        changes.scatter_add_(1, first.expand_as(ranges), ranges).scatter_add_(1, stop.expand_as(ranges), -ranges)
        covered_keys = joined(changes.cumsum(1)[:, : grid.key_length] > 0, keys, and_)
    return covered_queries[:, None], covered_keys[:, None]  # the heads' dimension


def _of_marks(queries: Tensor | None, keys: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor]:
    """(1 or B, 1 or L) and (1 or B, S), if a key is visible to a query whenever both are marked."""
    # A marked query is covered only if a key is marked, and a marked key only if a query is marked.
    every = torch.ones(1, 1, dtype=torch.bool, device=grid.device)
    covered_queries = every if keys is None else keys.any(1, keepdim=True)
    covered_keys = every if queries is None else queries.any(1, keepdim=True)
    covered_queries, covered_keys = joined(covered_queries, queries, and_), joined(covered_keys, keys, and_)
    return covered_queries, covered_keys.expand(-1, grid.key_length)


def _coverage_of_lists(bound: BoundMask) -> tuple[Tensor, Tensor]:
    """The covered queries (1 or B, 1 or H, L) and keys (1 or B, 1 or H, S) of selected keys, from their lists."""
    grid, selection = bound.grid, cast(Selection, bound.selection)
    of_row = selection.indices[..., 0, :].numel() * selection.block * grid.num_heads
    step = max(1, _ROWS_AT_A_TIME // max(1, of_row))
    queries: list[Tensor] = []
    keys: Tensor | None = None
    for start in range(0, grid.query_length, step):
        block = Block(grid, rows=slice(start, min(start + step, grid.query_length)))
        columns, shown = listed_columns(selection, block)
        if columns.shape[1] > 1:
            listing = block.h.flatten() * columns.shape[1] // grid.num_heads
            columns, shown = columns.index_select(1, listing), shown.index_select(1, listing)
        others = shown_cells(bound, block, columns)
        shown = shown if others is None else shown & others  # (1 or B, 1 or H, l, n)
        queries.append(shown.any(-1))
        if keys is None:
            keys = shown.new_zeros(*shown.shape[:2], grid.key_length + 1)
        # What is not shown marks one more column.
        keys.scatter_(2, torch.where(shown, columns, grid.key_length).flatten(2), True)
    return torch.cat(queries, 2), cast(Tensor, keys)[..., :-1]


def _ends(rows: RowRanges | None, band: Band, grid: Grid) -> tuple[Tensor, Tensor]:
    """First and one past the last column of each row, within the grid."""
    numbers = torch.arange(grid.query_length, device=grid.device)[None]
    first, stop = numbers + band.low, (numbers + (band.high + 1)).clamp(max=band.stop)
    if rows is not None:
        first = first if rows.first is None else torch.maximum(first, rows.first)
        stop = torch.minimum(stop, rows.stop)
    return first.clamp(0, grid.key_length), stop.clamp(0, grid.key_length)  # (1 or B, L) each


def _any_key(first: Tensor, stop: Tensor, keys: Tensor | None, grid: Grid) -> Tensor:
    """Whether a column from first to stop is marked, (1 or B, L)."""
    if keys is None:
        return stop > first
    # The number of marked keys before each column: equal at both ends of a range without marked keys.
    before = F.pad(keys.long().cumsum(1), (1, 0))  # (b, S + 1)
    batch = max(len(before), len(first), len(stop))
    before, first, stop = (tensor.expand(batch, -1) for tensor in (before, first, stop))
    return before.gather(1, stop.maximum(first)) > before.gather(1, first)


def _search(bound: BoundMask) -> tuple[Tensor, Tensor]:
    """The covered queries (1 or B, 1 or H, L) and keys (1 or B, 1 or H, S), from evaluated cells.

    In most masks a few rows cover all keys, and a few columns cover all queries. The borders are therefore evaluated
    first, and then only the rows and columns that they leave open.
    """
    grid = bound.grid
    length, count = grid.query_length, grid.key_length
    # One result for all items and heads that share the mask.
    cell = bound.visible(Block.cell(grid))
    items, heads = (1, 1) if cell is None else cell.shape[:2]
    queries = torch.zeros(items, heads, length, dtype=torch.bool, device=grid.device)
    keys = torch.zeros(items, heads, count, dtype=torch.bool, device=grid.device)

    def cells(rows: slice, columns: slice) -> Tensor:
        visible = bound.visible(Block(grid, rows=rows, columns=columns))
        return keys.new_ones(1, 1, 1, 1) if visible is None else visible

    open_rows, open_columns = (0, length), (0, count)
    # Reading the outcome to stop early would synchronise an accelerator.
    if length * count > _FEW_CELLS and queries.is_cpu and type(queries) is Tensor:
        for rows in _edges(length, _EDGE_ROWS):
            columns = slice(*bound.structure.columns(grid, rows))
            if columns.start >= columns.stop:
                continue
            keys[..., columns] |= cells(rows, columns).any(-2)
            # Usually one border is enough.
            if bool(keys.all()):
                break
        for columns in _edges(count, _EDGE_COLUMNS):
            queries |= cells(slice(0, length), columns).any(-1)
            if bool(queries.all()):
                break
        open_rows, open_columns = _open(queries), _open(keys)
        if open_rows == open_columns == (0, 0):
            return queries, keys
    # The budget includes all items and heads of a cell.
    for rows, (start, stop) in row_blocks(bound, max(1, _ROWS_AT_A_TIME // max(1, items * heads))):
        # Rows whose coverage is known are only evaluated in the open columns.
        is_known = rows.stop <= open_rows[0] or rows.start >= open_rows[1]
        if is_known:
            start, stop = max(start, open_columns[0]), min(stop, open_columns[1])
        if start < stop:
            visible = cells(rows, slice(start, stop))
            if not is_known:
                queries[..., rows] |= visible.any(-1)
            if open_columns[1] > 0:
                keys[..., start:stop] |= visible.any(-2)
    return queries, keys


def _edges(length: int, width: int) -> tuple[slice, slice]:
    return slice(0, min(width, length)), slice(max(0, length - width), length)


def _open(covered: Tensor) -> tuple[int, int]:
    """First and one past the last number that is not covered for all items and heads; (0, 0) if all are."""
    numbers = (~covered).flatten(0, 1).any(0).nonzero()
    return (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)


def _marks_between(start: int, stop: int, length: int, grid: Grid) -> Tensor | None:
    """Bool (1, 1, length, 1), true from start to stop; ``None`` if that is everything."""
    if start == 0 and stop == length:
        return None
    numbers = torch.arange(length, device=grid.device)
    return ((numbers >= start) & (numbers < stop))[None, None, :, None]


def _unless_all(covered: Tensor) -> Tensor | None:
    """(…, n, 1), or ``None`` if all are covered. Values are read only on the CPU, without a synchronisation."""
    is_readable = covered.is_cpu and type(covered) is Tensor
    return None if is_readable and bool(covered.all()) else covered[..., None]


def _coverage_at_once(bound: BoundMask) -> Coverage:
    # All cells at once, without reading values.
    grid = bound.grid
    visible = bound.visible(Block(grid))
    if visible is None:
        return COVERS_ALL
    queries = visible.any(-1).expand(-1, -1, grid.query_length)  # (1 or B, 1 or H, L)
    keys = visible.any(-2).expand(-1, -1, grid.key_length)
    return Coverage.of(queries[..., None], keys[..., None])


def _tensors(structure: Structure) -> list[Tensor]:
    """All tensors of a structure, (1 or B, 1 or H, 1 or L, 1 or S) each; none if they are not all of the mask."""
    if not structure.exact or structure.rows is not None:
        return []
    tensors = [*structure.tensors, *structure.biases]
    if structure.queries is not None:
        tensors.append(structure.queries[:, None, :, None])
    if structure.keys is not None:
        tensors.append(structure.keys[:, None, None, :])
    return tensors
