"""The `torch.nn.Linear` layers of a model that `clearhead.nn.Linear` computes faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._layer.linear import Linear, chosen_backend, describe_backend
from .._layer.unmodified import is_unmodified


def linears_to_swap(model: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The layers that compute only x Wᵀ + b, if `clearhead.nn.Linear` may choose oneDNN's GEMM for them.

    Returns:
        The layers by their qualified names, and the reason for each other layer.
    """
    swapped: dict[str, nn.Linear] = {}
    unchanged: dict[str, str] = {}
    stays = f"the GEMM stays {describe_backend()}" if chosen_backend() == "pytorch" else None
    for name, module in _outside_of_ours(model):
        if isinstance(module, nn.Linear):
            why = _why_not(module) or ("it is part of an adapter" if _is_part_of_lora(model, name) else stays)
            if why is None:
                swapped[name] = module
            else:
                unchanged[name] = why
    return swapped, unchanged


def own_linears(model: nn.Module) -> dict[str, Linear]:
    """The layers of Clearhead's class, which `upgrade` may have set."""
    return {name: module for name, module in _outside_of_ours(model) if type(module) is Linear}


def _outside_of_ours(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules except parts of attention modules, which multiply with their projections' parameters themselves."""
    inside = {
        id(part)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) or type(module).__module__.startswith("clearhead.")
        for part in module.children()
    }
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def _why_not(module: nn.Linear) -> str | None:
    kind, weight = type(module), module.__dict__["_parameters"].get("weight")
    if kind is Linear:
        return "it is Clearhead's already"
    if kind is not nn.Linear:
        return f"{kind.__module__}.{kind.__qualname__} is a subclass with code of its own"
    if not is_unmodified(module):
        return "it has hooks, a parametrization, or a forward of its own"
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype != torch.float32 or not weight.is_cpu:
        return f"PyTorch's GEMM is as fast for {weight.dtype} on {weight.device.type}"
    return None


def _is_part_of_lora(model: nn.Module, name: str) -> bool:
    """Whether an adapter of peft contains the layer: a layer that it trains, or the layer that it wraps."""
    path = name.split(".")[:-1]
    ancestors = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
    kinds = [kind for ancestor in ancestors for kind in type(ancestor).__mro__]
    return any(kind.__name__ == "BaseTunerLayer" and kind.__module__.startswith("peft.") for kind in kinds)
