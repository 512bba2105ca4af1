"""Lowering: from the description of a mask to the form that a kernel reads."""

from __future__ import annotations

from collections.abc import Iterator
from operator import add, and_

import torch
from torch import Tensor

from ._bound import BoundMask
from ._grid import Block, Grid
from ._structure import Structure, joined
from ._terms import Terms, terms_of_parts

ENOUGH_ROWS = 64  # fewer rows do not fill a GEMM, and the overhead of Python dominates


def is_plain_causal(bound: BoundMask) -> bool:
    """Whether the mask is exactly j ≤ i, which is a flag of fused kernels."""
    band = None if bound.mask is None else bound.band
    return band is not None and band.is_causal(bound.grid)


def hides_nothing(bound: BoundMask) -> bool:
    """Whether the structure of the mask shows that it hides nothing, as `causal` does for a single last query."""
    # A graph holds for all lengths, and this only for some of them.
    if bound.mask is None or not bound.grid.has_values:
        return bound.mask is None
    return bound.band is not None and bound.band.shows_all(bound.grid)


def additive(bound: BoundMask, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """A mask as a bool tensor and a bias, (1 or B, 1 or H, 1 or L, 1 or S) each. A bias hides with its own −∞."""
    structure, grid = bound.structure, bound.grid
    if structure.exact and not structure.biases:
        return Terms.of(structure, grid).cells(grid), None
    biases, bias = [part for part in bound.parts if part.has_bias], None
    visible = terms_of_parts([part for part in bound.parts if not part.has_bias], grid).cells(grid)
    for part in biases:
        bias = joined(bias, part.bias(Block(grid), dtype), add)
        # With several biases, one may be −∞ where another is ∞, so their −∞ are needed as bools.
        if len(biases) > 1 or not part.structure.biases:
            visible = joined(visible, part.visible(Block(grid)), and_)
    return visible, bias


def dense_mask(bound: BoundMask) -> Tensor:
    """The whole mask, (B, H, L, S): bool, or float with −inf for hidden keys if there is a bias."""
    grid = bound.grid
    shape = (grid.batch_size, grid.num_heads, grid.query_length, grid.key_length)
    dtype = torch.float32
    # The dtype of the scores is not known here, so the bias keeps its digits.
    for tensor in bound.bias_tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    visible, bias = additive(bound, dtype)
    if bias is None:
        if visible is None:
            return torch.ones(shape, dtype=torch.bool, device=grid.device)
        return visible.expand(shape)
    return (bias if visible is None else bias.masked_fill(~visible, float("-inf"))).expand(shape)


def row_blocks(
    bound: BoundMask, cells: int, fewest_rows: int = 1, enough_rows: int = ENOUGH_ROWS
) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Cut the rows into blocks that fit a budget, each with the columns that can be visible to its rows.

    r rows under a window of w columns touch w + r − 1 columns. Blocks have so few rows that at least about half of
    their cells are visible.

    Args:
        bound: its structure rules out columns.
        cells: the most cells (rows × columns) of a block.
        fewest_rows: the fewest rows of a block, even beyond the budget.
        enough_rows: a block that fits the budget with these rows has no fewer, whatever the mask hides.

    Yields:
        The rows, and the first and one past the last column.
    """
    structure, grid = bound.structure, bound.grid
    start = 0
    while start < grid.query_length:
        rows, columns = _block_from(start, structure, grid, cells, fewest_rows, enough_rows)
        count, width = rows.stop - start, columns[1] - columns[0]
        while columns[1] - columns[0] <= width:  # the next rows often have as many columns
            yield rows, columns
            start = rows.stop
            if start == grid.query_length:
                return
            rows, columns = _range(structure, grid, start, min(count, grid.query_length - start))


def _block_from(
    start: int, structure: Structure, grid: Grid, cells: int, fewest_rows: int, enough_rows: int
) -> tuple[slice, tuple[int, int]]:
    """The block that begins at a row: all rows that fit, or only the rows with about the columns of the first row."""
    remaining = grid.query_length - start
    rows, columns = _range(structure, grid, start, 1)
    first_width = max(1, columns[1] - columns[0])
    most = min(remaining, max(fewest_rows, cells // first_width))
    # All rows that fit the budget, if they have few more columns than the first one. Under a sliding window as many
    # rows as its width, or half as many, so that most cells of the block are visible.
    for count in (most, first_width, first_width // 2):
        count = min(most, max(count, enough_rows))
        rows, columns = _range(structure, grid, start, count)
        if columns[1] - columns[0] <= first_width + first_width // 4:
            break
    # Later rows may have more columns than the first, so the block can exceed the budget.
    while (count := rows.stop - start) > fewest_rows and count * (width := columns[1] - columns[0]) > cells:
        rows, columns = _range(structure, grid, start, min(remaining, max(fewest_rows, cells // width)))
    return rows, columns


def _range(structure: Structure, grid: Grid, start: int, count: int) -> tuple[slice, tuple[int, int]]:
    rows = slice(start, start + count)
    return rows, structure.columns(grid, rows)


def touched_share(bound: BoundMask) -> float:
    """The share of the L × S matrix in the blocks of `row_blocks`, in [0, 1]."""
    grid = bound.grid
    all_cells = grid.query_length * grid.key_length
    blocks = row_blocks(bound, cells=all_cells)
    return sum((rows.stop - rows.start) * (stop - start) for rows, (start, stop) in blocks) / max(1, all_cells)
