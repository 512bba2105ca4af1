"""Modules with random parameters."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def randomised(module: M, std: float = 0.25) -> M:
    """Draw every parameter, weights of norms around 1: fresh biases, sinks and norms are constants that hide faults."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(mean=float(is_norm), std=std)
    return module.eval()
