"""A mask for the native kernel: a band, one range of columns per row, and tensors that it reads in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._call.call import AttentionCall
from ..masks._base import Mask
from ..masks._grid import Grid
from ..masks._lowering import completed
from ..masks._structure import Band, RowRanges

#: A mask by the names of `NativeArguments`: a key is visible where all of them allow it.
LoweredMask = dict[str, Any]


def lower_mask(call: AttentionCall) -> LoweredMask:
    """The call's mask; what is neither band nor range becomes a tensor."""
    mask, grid = call.mask, call.grid
    if mask is None:
        return lower_band(Band.whole(grid))
    return mask.lowered(grid, "native", lambda: _lower(mask, grid))


def lower_band(band: Band) -> LoweredMask:
    """A mask that is a band."""
    return {"low": band.low, "high": band.high, "stop": band.stop}


def _lower(mask: Mask, grid: Grid) -> LoweredMask:
    structure = completed(mask, grid, torch.float32)
    band = structure.band or Band.whole(grid)
    tensors = [*structure.tensors]
    if structure.keys is not None:
        tensors.append(structure.keys[:, None, None, :])
    rows = structure.rows
    if structure.queries is not None:
        # A fully masked row is an empty range, whose tiles the kernel skips.
        unmasked = RowRanges(None, structure.queries * grid.key_length)
        rows = unmasked if rows is None else rows.meet(unmasked)
    # The kernel reads one bool tensor and one bias, so several are joined first.
    visible, bias = None, None
    for tensor in tensors:
        visible = tensor if visible is None else visible & tensor
    for added in structure.biases:
        added = added.float().resolve_neg()  # which are read as they lie in memory
        bias = added if bias is None else bias + added
    first, last = (None, None) if rows is None else _within(rows, grid)
    return {**lower_band(band), "first": first, "last": last, "visible": visible, "bias": bias}


def _within(rows: RowRanges, grid: Grid) -> tuple[Tensor, Tensor]:
    """First and one past the last column, int32, within the grid."""
    stop = rows.stop.long().clamp(0, grid.key_length).int()
    first = torch.zeros_like(stop) if rows.first is None else rows.first.clamp(0, grid.key_length).int()
    first, stop = torch.broadcast_tensors(first, stop)
    return first.contiguous(), stop.contiguous()
