"""What the native kernel takes of a mask: a band, a range of columns per row, and tensors that it reads in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._call.call import AttentionCall
from ..masks._base import Mask
from ..masks._grid import Grid
from ..masks._lowering import completed
from ..masks._structure import Band, RowRanges


@dataclass(frozen=True)
class LoweredMask:
    """A key is visible where all of these allow it.

    Args:
        low, high, stop: row i sees i + low ≤ j ≤ i + high and j < stop.
        row_ranges: first and one past the last column of each row, int32 (1 or B, 1 or L) each, or ``None``.
        visible: bool (1 or B, 1 or H, 1 or L, 1 or S), or ``None``.
        bias: float32 of such a shape, added to the scores, or ``None``.
    """

    low: int
    high: int
    stop: int
    row_ranges: tuple[Tensor, Tensor] | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None


def lower_mask(call: AttentionCall) -> LoweredMask:
    """The call's mask; what is neither band nor range becomes a tensor."""
    mask, grid = call.mask, call.grid
    if mask is None:
        return LoweredMask(-grid.query_length, grid.key_length, grid.key_length)
    return mask.lowered(grid, "native", lambda: _lower(mask, grid))


def _lower(mask: Mask, grid: Grid) -> LoweredMask:
    found = completed(mask, grid, torch.float32)
    band = found.band or Band.whole(grid)
    tensors = [*found.tensors]
    if found.keys is not None:
        tensors.append(found.keys[:, None, None, :])
    rows = found.rows
    if found.queries is not None:
        # A fully masked row is an empty range, whose tiles the kernel skips.
        some = RowRanges(None, found.queries * grid.key_length)
        rows = some if rows is None else rows.meet(some)
    # Tensors that stand for one condition each are joined before the kernel reads them: it takes one of a kind.
    visible, bias = None, None
    for tensor in tensors:
        visible = tensor if visible is None else visible & tensor
    for added in found.biases:
        added = added.float().resolve_neg()  # which are read as they lie in memory
        bias = added if bias is None else bias + added
    return LoweredMask(band.low, band.high, band.stop, None if rows is None else _within(rows, grid), visible, bias)


def _within(rows: RowRanges, grid: Grid) -> tuple[Tensor, Tensor]:
    """First and one past the last column, int32, within the grid."""
    stop = rows.stop.long().clamp(0, grid.key_length).int()
    first = torch.zeros_like(stop) if rows.first is None else rows.first.clamp(0, grid.key_length).int()
    first, stop = torch.broadcast_tensors(first, stop)
    return first.contiguous(), stop.contiguous()
