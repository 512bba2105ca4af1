"""Kinds of native call with masks that came before: what masks hide from everybody, and then the prepared call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..call import AttentionCall, without_hidden
from ..masks.base import Mask
from ..masks.kinds import marks_and_numbers
from ..masks.reach import Reach
from ..masks.tensors import as_mask
from .base import Kernel
from .native_prepared import Prepared, differentiable

__all__ = ["masked"]


def masked(
    kernel: Kernel, call: AttentionCall, prepared: Prepared
) -> Callable[[Tensor, Tensor, Tensor, Mask | Tensor], Tensor]:
    """The computation for calls that differ from this one in the numbers of query, key, value and masks alone."""
    template = call.without_tensors()
    with_gradients = differentiable(template, prepared) if call.needs_gradients else None

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor) -> Tensor:
        masks = marks_and_numbers(mask)
        queries, keys = prepared.find_hidden(masks)
        if queries is not None or keys is not None:  # then tensors may lie elsewhere than it was prepared for
            seen = Reach(*(None if side is None else side[..., None] for side in (queries, keys)))
            query, key, value = without_hidden(query, key, value, seen)
            given = replace(template, query=query, key=key, value=value, mask=as_mask(mask), reach=seen)
            return kernel.run(given)[0]
        if with_gradients is not None:
            return with_gradients(query, key, value, mask)
        return prepared.forward((query, key, value), None, masks)

    return compute
