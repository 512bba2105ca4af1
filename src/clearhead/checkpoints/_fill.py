"""Copies of tensors as the parameters of a module whose own parameters are on ``"meta"``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._multihead import MultiHeadAttention
from ._namings import ROLES
from ._unpack import Projections

#: The names of the projections in `MultiHeadAttention`.
LINEARS = dict(zip(ROLES, ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True))


def fill(module: MultiHeadAttention, projections: Projections) -> None:
    """Replace the parameters of the module's projections by copies of the tensors."""
    for role, (weight, bias) in projections.items():
        linear: Any = getattr(module, LINEARS[role])
        linear.weight = parameter(weight)
        if bias is not None:
            linear.bias = parameter(bias)
        elif linear.bias is not None:
            linear.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))


def parameter(tensor: Tensor) -> nn.Parameter:
    """A parameter with a copy of the tensor."""
    return nn.Parameter(copied(tensor))


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy of the tensor, outside of any graph."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
