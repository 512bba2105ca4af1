"""A mask for the native kernel: a band, one range of columns per row, and tensors that it reads in place."""

from __future__ import annotations

from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks._bound import BoundMask
from ..masks._listed import at_columns
from ..masks._structure import joined
from ..masks._terms import Terms, terms_of
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
    if terms.selection is not None and terms.selection.block == 1:
        terms = _within_documents(terms)
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


def _within_documents(terms: Terms) -> Terms:
    """The terms with documents as part of the lists of selected keys, so that they need not be written as (L, S)."""
    selection, of_queries, of_keys = terms.selection, terms.query_documents, terms.key_documents
    if selection is None or of_queries is None or of_keys is None or of_keys.shape[1] == 0:
        return terms
    listed = at_columns(of_keys[:, None, None], selection.indices.long().clamp(0, of_keys.shape[1] - 1))
    same = listed == of_queries[:, None, :, None]  # (1 or B, heads, L, k)
    selection = selection._replace(indices=torch.where(same, selection.indices, -1))
    return terms._replace(selection=selection, query_documents=None, key_documents=None)
