"""A mask for the native kernel: a band, one range of columns per row, and tensors that it reads in place."""

from __future__ import annotations

from typing import Any

import torch

from ..masks._base import Mask
from ..masks._grid import Block, Grid
from ..masks._structure import Band, RowRanges, Structure, structure_of


def lower_mask(mask: Mask, grid: Grid) -> dict[str, Any]:
    """A mask by the names of `NativeArguments`: a key is visible where all of them allow it.

    A part that is neither a band nor ranges becomes a tensor.
    """
    structure = Structure()
    for part in mask.parts():
        # A part without an exact structure is evaluated for the whole grid. The others stay as they are.
        exact = structure_of(part, grid)
        if not exact.exact:
            visible, bias = part.visible(Block(grid)), part.bias(Block(grid), torch.float32)
            exact = Structure(tensors=() if visible is None else (visible,), biases=() if bias is None else (bias,))
        structure = structure.meet(exact)
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
    lowered: dict[str, Any] = {**vars(band), "visible": visible, "bias": bias}
    if rows is not None:
        last = rows.stop.long().clamp(0, grid.key_length).int()
        first = torch.zeros_like(last) if rows.first is None else rows.first.clamp(0, grid.key_length).int()
        first, last = torch.broadcast_tensors(first, last)
        lowered.update(first=first.contiguous(), last=last.contiguous())
    return lowered
