"""From the description of a mask to what a kernel takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._environment import is_tracing
from ._base import Mask
from ._grid import Block, Grid
from ._structure import Structure, structure_of

_ENOUGH_ROWS = 64  # fewer do not fill a matrix product, nor pay for the Python around it


def is_plain_causal(mask: Mask | None, grid: Grid) -> bool:
    """True if the mask says exactly j ≤ i, which fused kernels know as a flag."""
    band = None if mask is None else structure_of(mask, grid).only_band(grid)
    return band is not None and band.is_causal(grid)


def hides_nothing(mask: Mask, grid: Grid) -> bool:
    """True if it is known without looking that every query sees every key, as the last one does under `causal`."""
    # A graph is made for any length, and every query sees every key for some of them alone.
    if is_tracing():
        return False
    band = structure_of(mask, grid).only_band(grid)
    return band is not None and band.shows_all(grid)


def completed(mask: Mask, grid: Grid, dtype: torch.dtype) -> Structure:
    """The structure of a mask, exact: parts that say more than their structure are evaluated for the whole grid.

    Args:
        mask, grid: of the call.
        dtype: of the scores, for biases that are computed.
    """
    found = Structure()
    for part in mask.parts():
        # Only what is not known is built: a computed part does not turn the others into tensors.
        own = structure_of(part, grid)
        if not own.exact:
            visible, bias = part.visible(Block(grid)), part.bias(Block(grid), dtype)
            own = Structure(tensors=() if visible is None else (visible,), biases=() if bias is None else (bias,))
        found = found.meet(own)
    return found


def differs_between_heads(mask: Mask, grid: Grid) -> bool:
    """Whether a part has to be evaluated and is of the size of the scores."""
    return any(heads > 1 for _, heads in computed_sizes(mask, grid))


def computed_sizes(mask: Mask, grid: Grid) -> Iterator[tuple[int, int]]:
    """Batch items and heads of what has to be evaluated of each part; 1 for what is the same for all of them."""
    if 0 in (grid.batch_size, grid.num_heads, grid.query_length, grid.key_length):
        return
    # Evaluated for one cell, because a kernel is chosen before anything of the scores' size exists.
    cell = chosen_cell(grid)
    for part in mask.parts():
        if not structure_of(part, grid).exact:
            for tensor in (part.visible(cell), part.bias(cell, torch.float32)):
                if tensor is not None:
                    yield tensor.shape[0], tensor.shape[1]


def additive(mask: Mask, grid: Grid, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """A mask as a bool tensor, a bias, or both, (1 or B, 1 or H, 1 or L, 1 or S); a bias hides with its own −∞."""
    block, visible, bias = Block(grid), None, None
    biases = sum(part.has_bias for part in mask.parts())
    for part in mask.parts():
        added = part.bias(block, dtype)
        if added is not None:
            bias = added if bias is None else bias + added
        # Of several biases one may hide with −∞ where another adds ∞.
        if biases < 2 and structure_of(part, grid).biases:
            continue
        seen = part.visible(block)
        if seen is not None:
            visible = seen if visible is None else visible & seen
    return visible, bias


def dense_mask(mask: Mask, grid: Grid) -> Tensor:
    """The whole mask, (B, H, L, S): bool, or float with −inf for hidden keys if there is a bias."""
    shape = (grid.batch_size, grid.num_heads, grid.query_length, grid.key_length)
    dtype = torch.float32
    # The dtype of the scores is not known here; a bias is shown without losing digits.
    for tensor in mask.bias_tensors():
        dtype = torch.promote_types(dtype, tensor.dtype)
    visible, bias = additive(mask, grid, dtype)
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
        mask: its structure says what can be skipped; ``None`` skips nothing.
        grid: the sizes.
        cells: rows × columns that a block may hold.
        fewest_rows: in a block, whatever the budget.

    Yields:
        The rows, and the first and one past the last column.
    """
    # Once for all blocks: the structure of documents takes a pass over their ids.
    structure = Structure() if mask is None else structure_of(mask, grid)
    start = 0
    while start < grid.query_length:
        rows, columns = _block_from(start, structure, grid, cells, fewest_rows)
        count, width = rows.stop - start, columns[1] - columns[0]
        while columns[1] - columns[0] <= width:  # the next rows often look alike
            yield rows, columns
            start = rows.stop
            if start == grid.query_length:
                return
            rows, columns = _range(structure, grid, start, min(count, grid.query_length - start))


def _block_from(
    start: int, structure: Structure, grid: Grid, cells: int, fewest_rows: int
) -> tuple[slice, tuple[int, int]]:
    """The block that begins at a row: as many rows as fit, or as see much the same columns as the first."""
    left = grid.query_length - start
    rows, columns = _range(structure, grid, start, 1)
    seen = max(1, columns[1] - columns[0])
    most = min(left, max(fewest_rows, cells // seen))
    # As many rows as fit the budget, if they see little more than the first one; under a window as many as it is
    # wide, or half as many, so that not much of what a block touches is hidden.
    for count in (most, seen, seen // 2):
        count = min(most, max(count, _ENOUGH_ROWS))
        rows, columns = _range(structure, grid, start, count)
        if columns[1] - columns[0] <= seen + seen // 4:
            break
    # Rows further down may see more columns than the first, which the budget did not count.
    while (count := rows.stop - start) > fewest_rows and count * (width := columns[1] - columns[0]) > cells:
        rows, columns = _range(structure, grid, start, min(left, max(fewest_rows, cells // width)))
    return rows, columns


def _range(structure: Structure, grid: Grid, start: int, count: int) -> tuple[slice, tuple[int, int]]:
    rows = slice(start, start + count)
    return rows, structure.columns(grid, rows)


def touched_share(mask: Mask | None, grid: Grid) -> float:
    """Which part of the L × S matrix is left when the columns that its structure rules out are skipped, in [0, 1]."""
    whole = grid.query_length * grid.key_length
    # The estimate that kernels are chosen by, from the same cut that kernels compute in.
    blocks = row_blocks(mask, grid, cells=whole)
    return sum((rows.stop - rows.start) * (stop - start) for rows, (start, stop) in blocks) / max(1, whole)


def chosen_cell(grid: Grid) -> Block:
    """One cell of all items and heads, which shows how a mask broadcasts. Chosen, as for runs masks take short cuts."""
    first = torch.zeros(1, dtype=torch.long, device=grid.device)
    return Block(grid, rows=first, columns=first)
