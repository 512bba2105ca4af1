"""A mask for the native kernel: a band, one range of columns per row, and tensors that it reads in place."""

from __future__ import annotations

from operator import and_
from typing import Any

import torch

from ..masks._bound import BoundMask
from ..masks._structure import joined
from ..masks._terms import terms_of


def lower_mask(bound: BoundMask) -> dict[str, Any]:
    """A mask by the names of `NativeArguments`: a key is visible where all of them allow it."""
    grid = bound.grid
    terms = terms_of(bound).written(grid)
    visible, bias, first, last = terms.visible, terms.bias, terms.first, terms.last
    if terms.keys is not None:
        visible = joined(visible, terms.keys[:, None, None, :], and_)
    if bias is not None:  # written out, because the kernel reads memory
        bias = bias.float().resolve_neg()
    lowered: dict[str, Any] = {"low": terms.low, "high": terms.high, "stop": terms.stop, "visible": visible}
    if last is not None:
        last = last.long().clamp(0, grid.key_length).int()
        first = torch.zeros_like(last) if first is None else first.clamp(0, grid.key_length).int()
        lowered.update(first=first.contiguous(), last=last.contiguous())
    return {**lowered, "bias": bias}
