"""Putting copies of tensors into a module that has no memory yet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._multihead import MultiHeadAttention
from ._namings import ROLES
from ._unpack import Projections


def fill(module: MultiHeadAttention, projections: Projections) -> None:
    """Put copies of the tensors in place of the parameters of the module's projections, made on ``"meta"``."""
    linears = (module.q_proj, module.k_proj, module.v_proj, module.out_proj)
    for role, linear in zip(ROLES, linears, strict=True):
        weight, bias = projections[role]
        linear.weight = parameter(weight)
        if bias is not None:
            linear.bias = parameter(bias)
        elif linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            linear.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))


def parameter(tensor: Tensor) -> nn.Parameter:
    """A parameter with a copy of the tensor."""
    return nn.Parameter(copied(tensor))


def copied(tensor: Tensor) -> Tensor:
    """The tensor's values in memory of their own, in order, outside of any graph."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
