"""What a call of the compiled kernel takes: the one declaration of its order in Python.

C++ declares it in ``_native/call.cpp``. The two are compared when this module is imported.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._native import require_arguments
from ..masks._grid import Offset

#: Tensors of every call. Output and lse are written, or read by a backward pass, and may be ``None``.
OPERANDS = ("query", "key", "value", "output", "lse")


class Extras(NamedTuple):
    """What a call may have besides.

    Args:
        sinks: (H,).
        first, last: int32 (1 or B, 1 or L), row i sees first ≤ j < last; both or neither.
        visible: bool (1 or B, 1 or H, 1 or L, 1 or S).
        bias: float32 of such a shape, added to the scores.
        seed: int64 scalar; dropout is drawn from it.
        cu_seqlens_q, cu_seqlens_k: int64 (documents + 1,), where documents begin and the last ends.
        offset: where the call lies in a larger one, for dropout; ``None``: it is the whole.
    """

    sinks: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    offset: Offset | None = None

    def arguments(self) -> tuple[int, ...]:
        """As `Plan`'s methods take them."""
        return *map(address_of, self[:-1]), *(self.offset or _WHOLE)


class BackwardArguments(NamedTuple):
    """What a backward pass takes besides, as `Plan.backward` takes it; see `NativePlan.backward`."""

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


_WHOLE = Offset(0)  # as many heads as the plan has
NO_EXTRAS = Extras()


def address_of(tensor: Tensor | None) -> int:
    """Of the first element; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


require_arguments(
    operands=OPERANDS,
    extras=(*Extras._fields[:-1], *Offset._fields),
    backward=BackwardArguments._fields,
)
