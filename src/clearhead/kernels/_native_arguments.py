"""The arguments of one call of the compiled kernel, and their order: the one declaration in Python.

C++ declares the order in ``_native/module.cpp``. The two are compared when this module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .._native import require_arguments
from ..masks._grid import Offset


class NativeArguments(NamedTuple):
    """The tensors and numbers of one call. They are also the arguments of the PyTorch operator.

    Args:
        query: (B, H, L, D); with `cu_seqlens_q` (1, H, T, D), packed sequences.
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        sinks: float32 (H,).
        first, last: int32 (1 or B, 1 or L), row i sees first ≤ j < last; both or neither.
        visible: bool (1 or B, 1 or H, 1 or L, 1 or S).
        bias: float32 of such a shape, added to the scores.
        seed: int64 scalar; dropout is drawn from it.
        cu_seqlens_q, cu_seqlens_k: int64 (sequences + 1,), where packed sequences begin and the last ends.
        scale, softcap, dropout_p, low, high, stop: as for `NativePlan`.
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
    seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    low: int | None = None
    high: int | None = None
    stop: int | None = None
    offset: Sequence[int] | None = None

    def addresses(self, output: Tensor | None, lse: Tensor | None, *backward: int) -> tuple[int, ...]:
        """The arguments of the compiled functions, which end early where the others are ``None``.

        The tensors must outlive the call. Output and lse are written, or read by a backward pass, and may be ``None``.
        """
        query, key, value, sinks, first, _, visible, bias, seed, cu_seqlens_q, *_ = self
        operands = query.data_ptr(), key.data_ptr(), value.data_ptr(), address_of(output), address_of(lse)
        if not backward and sinks is first is visible is bias is seed is cu_seqlens_q is None:
            return operands
        return *operands, *map(address_of, self[3:11]), *(self.offset or _NO_OFFSET), *backward


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


def address_of(tensor: Tensor | None) -> int:
    """The address of the first element, or 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


OPERANDS = "threads", "query", "key", "value", "output", "lse"
require_arguments(*OPERANDS, *NativeArguments._fields[3:11], *Offset._fields, *BackwardArguments._fields)
