"""From the description of a mask to what a kernel takes; the only place where masks become tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._environment import is_tracing
from ._band import band_of
from ._base import Mask
from ._grid import Block, Grid
from ._positional import Causal

__all__ = [
    "chosen_cell",
    "dense_mask",
    "hides_nothing",
    "is_plain_causal",
    "row_blocks",
    "touched_share",
]

_ENOUGH_ROWS = 64  # fewer do not fill a matrix product, nor pay for the Python around it


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


def chosen_cell(grid: Grid) -> Block:
    """One cell of all items and heads, which shows how a mask broadcasts. Chosen, as for runs masks take short cuts."""
    first = torch.zeros(1, dtype=torch.long, device=grid.device)
    return Block(grid, rows=first, columns=first)
