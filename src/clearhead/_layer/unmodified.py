"""Linear layers that nothing was changed on, whose parameters a layer may multiply with itself."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .._checks import PLAIN
from .._environment import Environment
from .._torch_private import is_compiled
from .linear import Linear, linear

#: PyTorch's module calls its output projection `NonDynamicallyQuantizableLinear`, which is a `Linear` by another name.
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in (Linear, nn.Linear, NonDynamicallyQuantizableLinear)}


def is_unmodified(module: nn.Module) -> bool:
    """Whether calling a module computes x Wᵀ + b of its own parameters and does nothing else, but for global hooks.

    It does more with hooks, a replaced or compiled ``forward``, parametrizations or a subclass, such as LoRA's.
    """
    kind: Any = type(module)
    forward = _FORWARDS.get(kind)
    if forward is None or forward is not kind.forward:
        return False
    # Read from the dictionaries: attributes of modules are looked up in three of them first.
    fields = module.__dict__
    return not (
        fields["_forward_pre_hooks"]
        or fields["_forward_hooks"]
        or fields["_backward_hooks"]
        or fields["_backward_pre_hooks"]
        or is_compiled(module)
        or "forward" in fields
        or fields["_parameters"].get("weight") is None
        or "bias" not in fields["_parameters"]
    )


def inputs_fit(
    query: Tensor, key: Tensor, value: Tensor, weights: tuple[object, object, object], batch_dim: int = 0
) -> bool:
    """Whether ordinary inputs can be multiplied with three weights as they are, and belong to one batch.

    Checks of arguments one by one, with an error for each, are made where it is not so.
    """
    itself = key is query and value is query
    # Self-attention with one weight for all three compares one pair.
    compared = 1 if itself and weights[0] is weights[1] is weights[2] else 3
    for x, weight in zip((query, key, value)[:compared], weights[:compared], strict=True):
        if type(x) is not Tensor or not isinstance(weight, Tensor) or type(weight) not in PLAIN:
            return False
        # A dtype is one object, which `is` compares faster than `!=`.
        if x.layout is not torch.strided or x.is_nested or x.dtype is not weight.dtype or x.device != weight.device:
            return False
        shape = x.shape
        if len(shape) not in (2, 3) or shape[-1] != weight.shape[1]:
            return False
    if itself:
        return True
    same = query.dim() == key.dim() == value.dim() and key.shape[:-1] == value.shape[:-1]
    return same and (query.dim() == 2 or query.shape[batch_dim] == key.shape[batch_dim])


def apply_linear(module: nn.Module, x: Tensor, environment: Environment) -> Tensor:
    """The output of ``module(x)``. An unmodified module is not called, which is faster."""
    if environment.tracing or environment.module_hooks or not is_unmodified(module):
        return module(x)
    parameters = module.__dict__["_parameters"]
    return linear(x, cast(Tensor, parameters["weight"]), parameters["bias"], environment)
