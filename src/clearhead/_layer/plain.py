"""Projections on whose being called nothing hangs, so that a layer may multiply with their parameters itself."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]

from .._environment import is_tracing
from .linear import Linear, eager_linear

__all__ = ["apply_linear", "bare_parameters", "is_plain", "plain_parameters"]


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module gives x Wᵀ + b of its own weight and bias and nothing else happens.

    It does not with hooks, a replaced or compiled ``forward``, parametrizations or a subclass, such as LoRA's.
    """
    return not _has_any_global_hook() and _is_bare(module)


def _is_bare(module: Any) -> bool:
    kind: Any = type(module)
    forward = _FORWARDS.get(kind)
    if forward is None or forward is not kind.forward:
        return False
    own = module.__dict__
    return not (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or module._compiled_call_impl is not None
        or "forward" in own
        or own["_parameters"].get("weight") is None
    )


def bare_parameters(*modules: object) -> list[Tensor | None] | None:
    """Weight and bias of each, one after the other; ``None`` where something hangs on one's being called."""
    found: list[Tensor | None] = []
    for module in modules:
        if not _is_bare(module):
            return None
        parameters: dict[str, Any] = module.__dict__["_parameters"]
        found.append(parameters["weight"])
        found.append(parameters["bias"])
    return found


#: PyTorch's module calls its output projection `NonDynamicallyQuantizableLinear`, which is a `Linear` by another name.
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in (Linear, nn.Linear, NonDynamicallyQuantizableLinear)}


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """What ``module(x)`` gives, without the cost of calling a module if nothing hangs on its being called."""
    if is_tracing() or not is_plain(module):
        return module(x)
    parameters = module._parameters  # pyright: ignore[reportPrivateUsage]
    return eager_linear()(x, cast(Tensor, parameters["weight"]), parameters["bias"])


def plain_parameters(*taken: tuple[Tensor, nn.Module]) -> list[tuple[Tensor, Tensor | None]] | None:
    """Weights and biases of plain projections, for `eager_linear`, if each takes its input as it is.

    Args:
        taken: ordinary batches (B, length, features), each with its projection.

    Returns:
        ``None`` where there is more to one of them, or an input does not fit.
    """
    if _has_any_global_hook() or is_tracing():
        return None
    found: list[tuple[Tensor, Tensor | None]] = []
    for x, module in taken:
        if (
            not _is_bare(module)
            or type(x) is not Tensor
            or x.is_nested
            or x.layout is not torch.strided
            or x.dim() != 3
        ):
            return None
        parameters: dict[str, Any] = module.__dict__["_parameters"]
        weight = parameters["weight"]
        if x.shape[2] != weight.shape[1] or x.dtype != weight.dtype or x.device != weight.device:
            return None
        found.append((weight, parameters["bias"]))
    return found
