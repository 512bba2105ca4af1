"""Kinds of native call with masks that came before: what masks hide from everybody, and then the prepared call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .._call.spec import AttentionCall, without_hidden
from ..masks._base import Mask
from ..masks._coverage import coverage
from ..masks._kinds import marks_and_numbers
from ..masks._tensors import as_mask
from ._base import Kernel
from ._native_prepared import HidesSomebody, Prepared, differentiable

__all__ = ["masked"]


def masked(
    kernel: Kernel, call: AttentionCall, prepared: Prepared
) -> Callable[[Tensor, Tensor, Tensor, Mask | Tensor], Tensor]:
    """The computation for calls that differ from this one in the numbers of query, key, value and masks alone."""
    template = replace(call.without_tensors(), mask=None)  # whose tensors are not to be kept
    with_gradients = differentiable(template, prepared) if call.needs_gradients else None

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor) -> Tensor:
        if with_gradients is None:
            output, hides = prepared.forward((query, key, value), None, marks_and_numbers(mask))
            return without(query, key, value, as_mask(mask)) if hides else output
        try:
            return with_gradients(query, key, value, mask)
        except HidesSomebody:
            return without(query, key, value, as_mask(mask))

    def without(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        seen = coverage(mask, template.grid)
        query, key, value = without_hidden(query, key, value, seen)  # which may lie otherwise now
        return kernel.run(replace(template, query=query, key=key, value=value, mask=mask, reach=seen))[0]

    return compute
