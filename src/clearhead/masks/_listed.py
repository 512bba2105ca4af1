"""The cells of selected keys: the columns that rows list, and which of them the other parts of a mask show.

Their number grows with k, not with S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._bound import BoundMask
from ._grid import Block, take
from ._structure import Selection
from ._terms import terms_of


def listed_columns(selection: Selection, block: Block) -> tuple[Tensor, Tensor]:
    """The columns that the rows of a block list, int64 (1 or b, listing heads, l, n), and which of them count, bool.

    The others are none, or were listed before, and have some column. All listing heads are returned.
    """
    indices, size = take(take(selection.indices, 0, block.batch), 2, block.rows).long(), selection.block
    numbers = indices.sort(-1).values
    counts = numbers >= 0
    counts[..., 1:] &= numbers[..., 1:] != numbers[..., :-1]
    if size > 1:
        numbers = (numbers[..., None] * size + torch.arange(size, device=numbers.device)).flatten(-2)
        counts = counts.repeat_interleave(size, -1)
    keys = block.grid.key_length
    return numbers.clamp(0, max(0, keys - 1)), counts & (numbers < keys)


def shown_cells(bound: BoundMask, block: Block, columns: Tensor) -> Tensor | None:
    """Which columns (1 or b, 1 or h, l, n) of the rows the mask shows besides listing them; ``None`` for all."""
    terms = terms_of(bound, gathers=True)
    shown = terms.in_band(block.i, columns, bound.grid)
    for limit, is_stop in ((terms.first, False), (terms.last, True)):
        if limit is not None:
            ends = take(take(limit, 0, block.batch), 1, block.rows)[:, None, :, None]  # (1 or b, 1, 1 or l, 1)
            shown.append(columns < ends if is_stop else columns >= ends)
    if terms.keys is not None:
        shown.append(at_columns(take(terms.keys, 0, block.batch)[:, None, None], columns))
    if terms.query_documents is not None and terms.key_documents is not None:
        queries = take(take(terms.query_documents, 0, block.batch), 1, block.rows)[:, None, :, None]
        shown.append(at_columns(take(terms.key_documents, 0, block.batch)[:, None, None], columns) == queries)
    if terms.visible is not None:
        shown.append(at_columns(_rows_of(terms.visible, block), columns))
    if terms.bias is not None:  # slopes hide nothing
        shown.append(at_columns(_rows_of(terms.bias, block), columns) != float("-inf"))
    every = None
    for each in shown:
        every = each if every is None else every & each
    return every


def bias_at(bound: BoundMask, block: Block, columns: Tensor) -> Tensor | None:
    """What the mask adds to the scores of these columns, floats like them, or ``None``."""
    terms = terms_of(bound, gathers=True)
    bias = None if terms.bias is None else at_columns(_rows_of(terms.bias, block), columns)
    if terms.slopes is None:
        return bias
    slopes = take(terms.slopes, 0, block.heads)[None, :, None, None]
    slope_bias = -slopes * (block.i + terms.shift - columns).abs()
    return slope_bias if bias is None else bias + slope_bias


def at_columns(tensor: Tensor, columns: Tensor) -> Tensor:
    """The numbers of a tensor (1 or b, 1 or h, 1 or l, 1 or S) in these columns."""
    if tensor.shape[3] == 1:
        return tensor
    shape = torch.broadcast_shapes(tensor.shape[:3], columns.shape[:3])
    return tensor.expand(*shape, -1).gather(3, columns.expand(*shape, -1))


def _rows_of(tensor: Tensor, block: Block) -> Tensor:
    for dim, index in enumerate((block.batch, block.heads, block.rows)):
        tensor = take(tensor, dim, index)
    return tensor
