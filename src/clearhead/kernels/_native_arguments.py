"""The arguments of one call of the compiled kernel, their order, and the strides of what it writes.

C++ declares the order in ``_native/module.cpp``. The two are compared when this module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from .._call.layout import Placed, has_contiguous_rows
from .._native import require_declared
from ..masks._bound import BoundMask
from ..masks._grid import Offset
from ..masks._listed import at_columns
from ..masks._structure import joined
from ..masks._terms import Terms, terms_of
from ._gathered import gathers

Strides = tuple[int, ...]

FAR = 1 << 40  #: limits nothing
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  #: `Type` of ``_native/problem.h``


class NativeArguments(NamedTuple):
    """The tensors and numbers of one call. They are also the arguments of the PyTorch operator.

    Args:
        query: (B, H, L, D); with `cu_seqlens_q` (1, H, T, D), packed sequences.
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        sinks: float32 (H,) or (B, H, L).
        first, last: int64 (1 or B, 1 or L) without gaps, row i sees first ≤ j < last. They may lie outside the keys.
            There is no first without a last.
        visible: bool (1 or B, 1 or H, 1 or L, 1 or S).
        bias: float32 of such a shape, added to the scores.
        selected: int32 (1 or B, heads, L, k), numbers of blocks of `block` keys that a row sees; −1 is none. Rows have
            no gaps, and the heads divide H.
        seed: int64 scalar; dropout is drawn from it.
        cu_seqlens_q, cu_seqlens_k: int64 (sequences + 1,), where packed sequences begin and the last ends.
        scale: factor of the scores.
        softcap: 0 is none.
        dropout_p: probability that a weight is dropped, if there is a seed.
        block: see `selected`.
        low, high, stop: row i sees i + low ≤ j ≤ i + high and j < stop. Default: everything.
        offset: the numbers of an `Offset`, for dropout. ``None`` means those of a call of its own.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    selected: Tensor | None = None
    seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    block: int = 1
    low: int | None = None
    high: int | None = None
    stop: int | None = None
    offset: Sequence[int] | None = None

    @property
    def limits(self) -> tuple[int, int, int]:
        """Low, high and stop as numbers."""
        low, high, stop = self.low, self.high, self.stop
        return -FAR if low is None else low, FAR if high is None else high, FAR if stop is None else stop

    def addresses_of_others(self) -> tuple[int, ...]:
        """The arguments between the band and those of a backward pass; empty if the call needs none.

        The tensors must outlive the call.
        """
        _, _, _, sinks, _, last, visible, bias, selected, seed, cu_seqlens_q, *_ = self
        if sinks is last is visible is bias is selected is seed is cu_seqlens_q is None:
            return ()
        return addresses_of(self[3:12], self.offset)


class BackwardArguments(NamedTuple):
    """The last arguments of a backward pass, in their order. `NativePlan.backward` explains them."""

    output_gradient: int
    output_gradient_batch: int  # and its other strides
    output_gradient_head: int
    output_gradient_row: int
    lse_gradient: int
    query_gradient: int
    key_gradient: int
    value_gradient: int
    correction: int
    bias_gradient: int
    whole_rows: int


_NO_OFFSET = Offset(0)  # as many heads as the plan has


class NativeMask(NamedTuple):
    """A mask as the kernel reads it, by the names of `NativeArguments`: a band, one range per row, and tensors."""

    low: int = -FAR
    high: int = FAR
    stop: int = FAR
    first: Tensor | None = None
    last: Tensor | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    selected: Tensor | None = None
    block: int = 1


NO_LIMITS = NativeMask()


def lowered(bound: BoundMask) -> NativeMask:
    """A mask with tensors that the kernel reads in place."""
    if bound.mask is None:
        return NO_LIMITS
    band = bound.band
    return bound.once("native", lambda: _lower(bound)) if band is None else NativeMask(band.low, band.high, band.stop)


def _lower(bound: BoundMask) -> NativeMask:
    if bound.structure.exact:
        terms = Terms.of(bound.structure, bound.grid)
    else:
        terms = terms_of(bound, gathers(bound))
        if terms.selection is not None and terms.selection.block == 1:
            terms = _within_documents(terms)
        terms = terms.written(bound.grid)
    low, high, stop, _, first, last, keys, visible, bias, *_ = terms
    if keys is not None:
        visible = joined(visible, keys.view(keys.shape[0], 1, 1, keys.shape[1]), and_)
    if bias is not None:  # written out, because the kernel reads memory
        bias = bias.float().resolve_neg()
    if last is not None and not (first is None and last.dtype is torch.int64 and last.is_contiguous()):
        last = last.long().contiguous()  # both have the same strides
        first = None if first is None else first.long().contiguous()
    selected, block = (None, 1) if terms.selection is None else terms.selection
    if selected is not None:
        selected = selected.int().contiguous()
    return NativeMask(low, high, stop, first, last, visible, bias, selected, block)


def _within_documents(terms: Terms) -> Terms:
    """The terms with documents as part of the lists of selected keys, so that they need not be written as (L, S)."""
    selection, of_queries, of_keys = terms.selection, terms.query_documents, terms.key_documents
    if selection is None or of_queries is None or of_keys is None or of_keys.shape[1] == 0:
        return terms
    listed = at_columns(of_keys[:, None, None], selection.indices.long().clamp(0, of_keys.shape[1] - 1))
    same = listed == of_queries[:, None, :, None]  # (1 or B, heads, L, k)
    selection = selection._replace(indices=torch.where(same, selection.indices, -1))
    return terms._replace(selection=selection, query_documents=None, key_documents=None)


def address_of(tensor: Tensor | None) -> int:
    """The address of the first element, or 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses_of(others: Sequence[Tensor | None], offset: Sequence[int] | None = None) -> tuple[int, ...]:
    """The arguments after the band, of tensors in the order of `NativeArguments` from its sinks on."""
    return *[0 if tensor is None else tensor.data_ptr() for tensor in others], *(offset or _NO_OFFSET)


OPERANDS = "threads", "query", "key", "value", "output", "lse", "keys", "low", "high", "stop"
require_declared("arguments", *OPERANDS, *NativeArguments._fields[3:12], *Offset._fields, *BackwardArguments._fields)
require_declared("types", *(str(dtype).removeprefix("torch.") for dtype in DTYPES))


def contiguous_strides(shape: tuple[int, ...]) -> Strides:
    """Those of a new tensor, also where a size is 0."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides))


def strides_of_gradient(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Those of the input where its elements fill its memory and its rows are whole, else contiguous ones."""
    if not has_contiguous_rows(shape, strides) or 0 in shape:
        return contiguous_strides(shape)
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != step:
            return contiguous_strides(shape)
        step *= size
    return strides


def strides_of_output(shape: tuple[int, ...], query: Strides) -> Strides:
    """With heads beside each other where the query's are: merging them is then free."""
    batch, heads, rows, dim = shape
    if query[1] < query[2]:
        return (heads * rows * dim, dim, heads * dim, 1)
    return contiguous_strides((batch, heads, rows, dim))


def strides_of_merged_output(shape: tuple[int, ...], query: Strides) -> Strides:
    """With items beside each other where the query's are, as in sequence-first modules."""
    batch, rows, features = shape
    if query[0] < query[1]:
        return (features, batch * features, 1)
    return contiguous_strides((batch, rows, features))


def strides_of_bias_gradient(shape: tuple[int, ...] | None) -> Strides | None:
    """Strides of items, heads and rows. A bias of one item gets the sum over the batch: its stride is 0."""
    if shape is None:
        return None
    items, *matrix = contiguous_strides(shape)[:3]
    return 0 if shape[0] == 1 else items, *matrix


def broadcast_strides(placed: Placed | None) -> Strides | None:
    """Strides, zero where a size of 1 broadcasts."""
    return None if placed is None else tuple(0 if size == 1 else stride for size, stride in zip(*placed, strict=True))
