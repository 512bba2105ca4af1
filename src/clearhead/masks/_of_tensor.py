"""What masks share that are made from one tensor."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from .._checks import INTEGERS, PLAIN, strided, with_values
from ..errors import DTypeError, shape_text
from ._base import Mask


class OfTensor(Mask):
    """A mask made by a function of this name from one tensor."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name, self._tensor = name, tensor

    def signature(self) -> Hashable | None:
        tensor = self._tensor
        # What a subclass's values are is up to the subclass, and how it is lowered may depend on them.
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_neg():
            return None
        layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        return type(self).__name__, self._name, layout

    def describe(self) -> str:
        return f"{self._name}({shape_text(self._tensor.shape)})"


def require_integers(name: str, tensor: object) -> None:
    """Raise unless it is a tensor of integers with values."""
    integers = strided(name, tensor, "an integer tensor")
    if integers.dtype not in INTEGERS:
        fix = (
            "Marks of 0 and 1 go into masks.keep(...)." if integers.dtype == torch.bool else "Convert it with .long()."
        )
        raise DTypeError(name, expected="an integer tensor", got=str(integers.dtype), fix=fix)
    with_values(name, integers)


def broadcasts(size: int, full: int) -> bool:
    # Written out, because a traced size is in no tuple.
    return size == 1 or size == full
