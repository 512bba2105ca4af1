"""Kinds of mask: what is the same for all masks that differ in the numbers of their tensors alone."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ._base import And, Mask
from ._positional import Causal
from ._tensors import Bias, Keep

__all__ = ["has_tensors", "kind_of_mask", "marks_and_numbers"]


def kind_of_mask(mask: object) -> Hashable:
    """Equal objects for masks of one kind, among those that are known.

    Returns:
        ``None`` for masks that are not made of `causal`, at most one tensor of marks, and at most one of numbers in
        float32 whose gradient nobody wants; both on the CPU.
    """
    if isinstance(mask, Causal):
        return mask.align
    if isinstance(mask, Keep):
        return _kind_of_tensor(mask.marks, mask.per_key)
    if isinstance(mask, Bias):
        return _kind_of_tensor(mask.tensor, None)
    if isinstance(mask, Tensor):
        return _kind_of_tensor(mask, False) if mask.dtype is torch.bool else None
    if not isinstance(mask, And):
        return None
    kinds = tuple(map(kind_of_mask, mask.parts()))
    tensors = [each[0] is None for each in kinds if type(each) is tuple]
    return (kinds,) if tensors and None not in kinds and len(tensors) == len(set(tensors)) else None


def _kind_of_tensor(tensor: Tensor, per_key: bool | None) -> Hashable:
    """`per_key` is ``None`` for numbers to add."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if per_key is None and (tensor.dtype is not torch.float32 or tensor.requires_grad or tensor.is_neg()):
        return None
    return per_key, tensor.shape, tensor.stride()


def has_tensors(kind: Hashable) -> bool:
    """Whether masks of this kind differ in anything."""
    return type(kind) is tuple


def marks_and_numbers(mask: Mask | Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The tensors that a mask of a known kind was made of."""
    if isinstance(mask, Keep):
        return mask.marks, None
    if isinstance(mask, Bias):
        return None, mask.tensor
    if not isinstance(mask, Mask):
        return mask, None
    pairs = [marks_and_numbers(part) for part in mask.parts() if isinstance(part, Keep | Bias)]
    return next((m for m, _ in pairs if m is not None), None), next((n for _, n in pairs if n is not None), None)
