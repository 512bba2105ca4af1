"""A mask for the native kernel: a band, one range of columns per row, and tensors that it reads in place."""

from __future__ import annotations

from operator import and_
from typing import NamedTuple

from torch import Tensor

from ..masks._bound import BoundMask
from ..masks._structure import joined
from ..masks._terms import terms_of
from ._gathered import gathers

class Lowered(NamedTuple):
    """A mask by the names of `NativeArguments`: a key is visible where all of them allow it."""

    low: int
    high: int
    stop: int
    first: Tensor | None = None
    last: Tensor | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    selected: Tensor | None = None
    block: int = 1


def lower_mask(bound: BoundMask) -> Lowered:
    """A mask as the kernel reads it."""
    terms = terms_of(bound, gathers=True) if gathers(bound) else terms_of(bound)
    if terms.query_documents is not None or terms.slopes is not None:
        terms = terms.written(bound.grid)
    visible, bias, first, last, keys = terms.visible, terms.bias, terms.first, terms.last, terms.keys
    if keys is not None:
        visible = joined(visible, keys.view(keys.shape[0], 1, 1, keys.shape[1]), and_)
    if bias is not None:  # written out, because the kernel reads memory
        bias = bias.float().resolve_neg()
    if last is not None:  # both have the same strides
        last = last.long().contiguous()
        first = None if first is None else first.long().contiguous()
    lowered = Lowered(terms.low, terms.high, terms.stop, first, last, visible, bias)
    if terms.selection is None:
        return lowered
    indices, block = terms.selection  # a copy unless it is int32 without gaps
    return lowered._replace(selected=indices.int().contiguous(), block=block)
