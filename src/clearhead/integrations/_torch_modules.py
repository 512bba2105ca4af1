"""PyTorch's attention modules, stacks and linear layers inside a model: swapped for Clearhead's classes, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._layer.linear import Linear, chosen_backend, describe_backend
from .._layer.unmodified import is_unmodified
from .._torch_private import remove_hook
from ..nn._multihead_attention import MultiheadAttention, keep_off_fast_path
from ..nn._stacks import STACKS, share_masks, stop_sharing, stop_zeroing, zero_padding
from ._classes import of_a_subclass, swap_class
from ._opacus import register_with_opacus

_NESTED_BEFORE = "_clearhead_use_nested_tensor"


#: Names of modules with a new class, names of other attention modules with the reason, names of switched encoders.
Swapped = tuple[list[str], dict[str, str], list[str]]


def swap_attention(model: nn.Module) -> Swapped:
    """Make every `nn.MultiheadAttention` Clearhead's. Stacks then share masks, and use no nested tensors.

    `nn.TransformerEncoder` makes nested tensors from padded batches, and only its fast path supports these.
    """
    changed, unchanged = _set_class(model, nn.MultiheadAttention, MultiheadAttention)
    register_with_opacus()
    for module in changed.values():
        module.register_forward_pre_hook(keep_off_fast_path)
    encoders: list[str] = []
    for name, stack in _stacks(model, ours=True):
        share_masks(stack)
        if isinstance(stack, nn.TransformerEncoder) and getattr(stack, "use_nested_tensor", False):
            setattr(stack, _NESTED_BEFORE, True)
            stack.use_nested_tensor = False
            zero_padding(stack)
            encoders.append(name)
    return list(changed), unchanged, encoders


def swap_attention_back(model: nn.Module) -> Swapped:
    """Undo `swap_attention`."""
    changed, unchanged = _set_class(model, MultiheadAttention, nn.MultiheadAttention)
    for module in changed.values():
        remove_hook(module, keep_off_fast_path)
    encoders: list[str] = []
    for name, stack in _stacks(model, ours=False):
        stop_sharing(stack)
        if isinstance(stack, nn.TransformerEncoder) and hasattr(stack, _NESTED_BEFORE):
            delattr(stack, _NESTED_BEFORE)
            stack.use_nested_tensor = True
            stop_zeroing(stack)
            encoders.append(name)
    return list(changed), unchanged, encoders


def _set_class(
    model: nn.Module, old: type[nn.Module], new: type[nn.Module]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Give the attention modules of one class another one. Returns them, and the reason for each other module."""
    changed: dict[str, nn.Module] = {}
    unchanged: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiheadAttention) and new is MultiheadAttention:
            unchanged[name] = "it is Clearhead's already"
        elif isinstance(module, old):
            why = swap_class(module, old, new)
            if why is None:
                changed[name] = module
            else:
                unchanged[name] = why
        elif new is MultiheadAttention and getattr(module, "original_name", None) == old.__name__:
            unchanged[name] = "torch.jit has compiled it"
    return changed, unchanged


def _stacks(model: nn.Module, *, ours: bool) -> list[tuple[str, nn.Module]]:
    """Stacks of layers by name, either those that contain Clearhead's attention or the others."""
    return [
        (name, stack)
        for name, stack in model.named_modules()
        if isinstance(stack, STACKS) and any(isinstance(part, MultiheadAttention) for part in stack.modules()) == ours
    ]


def linears_to_swap(model: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The layers that compute only x Wᵀ + b, if `clearhead.nn.Linear` may choose oneDNN's GEMM for them.

    Returns:
        The layers by their qualified names, and the reason for each other layer.
    """
    stays = f"the GEMM stays {describe_backend()}" if chosen_backend() == "pytorch" else None
    linears = {name: module for name, module in _outside_of_ours(model) if isinstance(module, nn.Linear)}
    reasons = {
        name: _why_not(module) or ("it is part of an adapter" if _is_part_of_lora(model, name) else stays)
        for name, module in linears.items()
    }
    swapped = {name: module for name, module in linears.items() if reasons[name] is None}
    return swapped, {name: why for name, why in reasons.items() if why is not None}


def own_linears(model: nn.Module) -> dict[str, Linear]:
    """The layers of Clearhead's class, which `upgrade` may have set."""
    return {name: module for name, module in _outside_of_ours(model) if type(module) is Linear}


def _outside_of_ours(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules except parts of attention modules, which multiply with their projections' parameters themselves."""
    inside = {
        id(part)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) or type(module).__module__.startswith("clearhead.")
        if not type(module).__module__.startswith(f"{__package__}.")
        for part in module.children()
    }
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def _why_not(module: nn.Linear) -> str | None:
    kind, weight = type(module), module.__dict__["_parameters"].get("weight")
    if kind is Linear:
        return "it is Clearhead's already"
    if kind is not nn.Linear:
        return of_a_subclass(module)
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
