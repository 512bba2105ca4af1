"""From the description of a mask to what a kernel takes; the only place where masks become tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tracing import is_tracing, is_transformed
from .band import band_of
from .base import Mask
from .grid import Block, Grid
from .positional import Causal

__all__ = [
    "Reach",
    "chosen_cell",
    "dense_mask",
    "hides_nothing",
    "is_plain_causal",
    "reach",
    "row_blocks",
    "touched_share",
]

_ROWS_AT_A_TIME = 1 << 21  # elements of mask evaluated at once when looking for hidden rows and columns
_ENOUGH_ROWS = 64  # fewer do not fill a matrix product, nor pay for the Python around it


@dataclass(frozen=True)
class Reach:
    """Which queries see any key, and which keys any query sees; ``None`` where all do.

    Args:
        queries: bool (1 or B, 1 or H, L, 1).
        keys: bool (1 or B, 1 or H, S, 1).
    """

    queries: Tensor | None
    keys: Tensor | None


def is_plain_causal(mask: Mask | None, grid: Grid) -> bool:
    """True if the mask says exactly j ≤ i, which fused kernels know as a flag."""
    return isinstance(mask, Causal) and mask.diagonal(grid) == 0


def hides_nothing(mask: Mask, grid: Grid) -> bool:
    """True if it is known without looking that every query sees every key, as the last one does under `causal`."""
    if is_tracing():
        return False
    band = band_of(mask, grid)
    return band is not None and band.shows_all(grid)


def dense_mask(mask: Mask, grid: Grid) -> Tensor:
    """The whole mask, (B, H, L, S): bool, or float with −inf for hidden keys if there is a bias."""
    shape = (grid.batch_size, grid.num_heads, grid.query_length, grid.key_length)
    block = Block(grid)
    visible = mask.visible(block)
    dtype = torch.float32
    for tensor in mask.bias_tensors():
        dtype = torch.promote_types(dtype, tensor.dtype)
    bias = mask.bias(block, dtype)
    if bias is None:
        if visible is None:
            return torch.ones(shape, dtype=torch.bool, device=grid.device)
        return visible.expand(shape)
    return (bias if visible is None else bias.masked_fill(~visible, float("-inf"))).expand(shape)


def row_blocks(
    mask: Mask | None, grid: Grid, cells: int, fewest_rows: int = 1
) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Cut the rows into blocks that fit a budget, each with the columns its rows can see.

    r rows under a window of w columns touch w + r − 1 of them, so blocks end early enough that about half of what
    they touch, at the least, is seen.

    Args:
        mask: says by `key_span` what can be skipped; ``None`` skips nothing.
        grid: the sizes.
        cells: rows × columns that a block may hold.
        fewest_rows: in a block, whatever the budget.

    Yields:
        The rows, and the first and one past the last column.
    """
    start = 0
    while start < grid.query_length:
        rows, columns = _block_from(start, mask, grid, cells, fewest_rows)
        count, width = rows.stop - start, columns[1] - columns[0]
        while columns[1] - columns[0] <= width:  # the next rows often look alike
            yield rows, columns
            start = rows.stop
            if start == grid.query_length:
                return
            rows, columns = _span(mask, grid, start, min(count, grid.query_length - start))


def _block_from(
    start: int, mask: Mask | None, grid: Grid, cells: int, fewest_rows: int
) -> tuple[slice, tuple[int, int]]:
    """The block that begins at a row: as many rows as fit, or as see much the same columns as the first."""
    left = grid.query_length - start
    rows, columns = _span(mask, grid, start, 1)
    seen = max(1, columns[1] - columns[0])
    most = min(left, max(fewest_rows, cells // seen))
    for count in (most, seen, seen // 2):
        count = min(most, max(count, _ENOUGH_ROWS))
        rows, columns = _span(mask, grid, start, count)
        if columns[1] - columns[0] <= seen + seen // 4:
            break
    while (count := rows.stop - start) > fewest_rows and count * (width := columns[1] - columns[0]) > cells:
        rows, columns = _span(mask, grid, start, min(left, max(fewest_rows, cells // width)))
    return rows, columns


def _span(mask: Mask | None, grid: Grid, start: int, count: int) -> tuple[slice, tuple[int, int]]:
    rows = slice(start, start + count)
    return rows, (0, grid.key_length) if mask is None else mask.key_span(grid, rows)


def touched_share(mask: Mask | None, grid: Grid) -> float:
    """Which part of the L × S matrix is left when the columns that `key_span` rules out are skipped, in [0, 1]."""
    whole = grid.query_length * grid.key_length
    blocks = row_blocks(mask, grid, cells=whole)
    return sum((rows.stop - rows.start) * (stop - start) for rows, (start, stop) in blocks) / max(1, whole)


def reach(mask: Mask, grid: Grid) -> Reach:
    """Find the queries that see nothing and the keys that nobody sees, in blocks of rows and of what they can see."""
    if is_plain_causal(mask, grid) and grid.query_length >= grid.key_length:
        return Reach(None, None)
    if is_tracing() or grid.query_length == 0 or grid.key_length == 0:
        return _reach_at_once(mask, grid)
    band = band_of(mask, grid)
    if band is None:
        return _reach_by_blocks(mask, grid)
    rows, columns = band.rows(grid), band.columns(grid)
    return Reach(_run(*rows, grid.query_length, grid), _run(*columns, grid.key_length, grid))


def _run(start: int, stop: int, length: int, grid: Grid) -> Tensor | None:
    """Bool (1, 1, length, 1), true from start to stop; ``None`` if that is everything."""
    if start == 0 and stop == length:
        return None
    places = torch.arange(length, device=grid.device)
    return ((places >= start) & (places < stop))[None, None, :, None]


def chosen_cell(grid: Grid) -> Block:
    """One cell of all items and heads, which shows how a mask broadcasts. Chosen, as for runs masks take short cuts."""
    first = torch.zeros(1, dtype=torch.long, device=grid.device)
    return Block(grid, rows=first, columns=first)


def _reach_by_blocks(mask: Mask, grid: Grid) -> Reach:
    cell = mask.visible(chosen_cell(grid))
    outer = (1, 1) if cell is None else (cell.shape[0], cell.shape[1])
    queries = torch.zeros(*outer, grid.query_length, dtype=torch.bool, device=grid.device)
    keys = torch.zeros(*outer, grid.key_length, dtype=torch.bool, device=grid.device)
    for rows, (start, stop) in row_blocks(mask, grid, max(1, _ROWS_AT_A_TIME // max(1, outer[0] * outer[1]))):
        if start == stop:
            continue
        visible = mask.visible(Block(grid, rows=rows, columns=slice(start, stop)))
        if visible is None:
            queries[..., rows] = True
            keys[..., start:stop] = True
        else:
            queries[..., rows] = visible.any(-1)
            keys[..., start:stop] |= visible.any(-2)
    return Reach(_unless_all(queries), _unless_all(keys))


def _unless_all(seen: Tensor) -> Tensor | None:
    """(…, n, 1), or ``None`` if all are seen. An accelerator would have to be waited for, so only the CPU is asked."""
    if seen.device.type == "cpu" and type(seen) is Tensor and not is_transformed() and bool(seen.all()):
        return None
    return seen[..., None]


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
