"""A mask for the native kernel: a band, one range of columns per row, and tensors that it reads in place."""

from __future__ import annotations

from operator import add, and_
from typing import Any

import torch

from ..masks._bound import BoundMask
from ..masks._lowering import evaluated
from ..masks._structure import Band, RowRanges, Structure, joined


def lower_mask(bound: BoundMask) -> dict[str, Any]:
    """A mask by the names of `NativeArguments`: a key is visible where all of them allow it.

    A part that is neither a band nor ranges becomes a tensor.
    """
    structure, grid = Structure(), bound.grid
    for part in bound.parts:
        structure = structure.meet(part.structure if part.structure.exact else evaluated(part))
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
        visible = joined(visible, tensor, and_)
    for added in structure.biases:  # written out, because the kernel reads memory
        bias = joined(bias, added.float().resolve_neg(), add)
    lowered: dict[str, Any] = {**band._asdict(), "visible": visible, "bias": bias}
    if rows is not None:
        last = rows.stop.long().clamp(0, grid.key_length).int()
        first = torch.zeros_like(last) if rows.first is None else rows.first.clamp(0, grid.key_length).int()
        first, last = torch.broadcast_tensors(first, last)
        lowered.update(first=first.contiguous(), last=last.contiguous())
    return lowered
