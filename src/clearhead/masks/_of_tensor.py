"""The base of masks that are made from one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import INTEGERS, strided, with_values
from .._torch_private import writes_to
from ..errors import DTypeError, shape_text
from ._base import Mask
from ._grid import Grid


class OfTensor(Mask):
    """A mask that the function of this name made from one tensor."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name, self._tensor = name, tensor
        self._copies: dict[torch.device, tuple[int | None, Tensor]] = {}

    def on(self, grid: Grid) -> Tensor:
        """The tensor on the device of a call. Another device gets a copy once, and again after a write."""
        tensor, device = self._tensor, grid.device
        if tensor.device == device or not grid.has_values:
            return tensor.to(device)
        writes = writes_to(tensor)
        known, copy = self._copies.get(device, (None, tensor))
        if known is None or known != writes:
            copy = tensor.to(device)
            if type(copy) is Tensor:  # a mode may make another one, which has no values after it
                self._copies[device] = writes, copy
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copies": {}}  # a copy of the mask makes its own

    def describe(self) -> str:
        return f"{self._name}({shape_text(self._tensor.shape)})"


def require_integers(name: str, tensor: object) -> None:
    """Raise unless it is a tensor of integers with values."""
    integers = strided(name, tensor, "an integer tensor")
    if integers.dtype not in INTEGERS:
        is_bool = integers.dtype == torch.bool
        fix = "Marks of 0 and 1 go into masks.keep(...)." if is_bool else "Convert it with .long()."
        raise DTypeError(name, expected="an integer tensor", got=str(integers.dtype), fix=fix)
    with_values(name, integers)


def broadcasts(size: int, full: int) -> bool:
    """Whether a dimension is 1 or full."""
    # Not `in (1, full)`, because a traced size is never in a tuple.
    return size == 1 or size == full
