"""PyTorch's attention modules inside a model and the stacks around them: swapped for Clearhead's class, and back."""

from __future__ import annotations

from torch import nn

from .._torch_private import remove_hook
from ..nn._encoder import drop_padding, keep_padding
from ..nn._multihead_attention import MultiheadAttention, keep_off_fast_path
from ..nn._sharing import STACKS, share_masks, stop_sharing

_NESTED_BEFORE = "_clearhead_use_nested_tensor"


#: Names of modules with a new class, names of other attention modules with the reason, names of switched encoders.
Swapped = tuple[list[str], dict[str, str], list[str]]


def swap_attention(model: nn.Module) -> Swapped:
    """Make every `nn.MultiheadAttention` Clearhead's. Stacks then share masks, and use no nested tensors.

    `nn.TransformerEncoder` makes nested tensors from padded batches, and only its fast path supports these.
    """
    changed: list[str] = []
    unchanged: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
            module.register_forward_pre_hook(keep_off_fast_path)
            changed.append(name)
        elif isinstance(module, MultiheadAttention):
            unchanged[name] = "it is Clearhead's already"
        elif isinstance(module, nn.MultiheadAttention):
            unchanged[name] = _of_a_subclass(module)
    encoders: list[str] = []
    for name, stack in _stacks(model, ours=True):
        share_masks(stack)
        if isinstance(stack, nn.TransformerEncoder) and getattr(stack, "use_nested_tensor", False):
            setattr(stack, _NESTED_BEFORE, True)
            stack.use_nested_tensor = False
            drop_padding(stack)
            encoders.append(name)
    return changed, unchanged, encoders


def swap_attention_back(model: nn.Module) -> Swapped:
    """Undo `swap_attention`."""
    changed: list[str] = []
    unchanged: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is MultiheadAttention:
            remove_hook(module, keep_off_fast_path)
            module.__class__ = nn.MultiheadAttention  # pyright: ignore[reportAttributeAccessIssue]
            changed.append(name)
        elif isinstance(module, MultiheadAttention):
            unchanged[name] = _of_a_subclass(module)
    encoders: list[str] = []
    for name, stack in _stacks(model, ours=False):
        stop_sharing(stack)
        if isinstance(stack, nn.TransformerEncoder) and hasattr(stack, _NESTED_BEFORE):
            delattr(stack, _NESTED_BEFORE)
            stack.use_nested_tensor = True
            keep_padding(stack)
            encoders.append(name)
    return changed, unchanged, encoders


def _stacks(model: nn.Module, *, ours: bool) -> list[tuple[str, nn.Module]]:
    """Stacks of layers by name, either those that contain Clearhead's attention or the others."""
    return [
        (name, stack)
        for name, stack in model.named_modules()
        if isinstance(stack, STACKS) and any(isinstance(part, MultiheadAttention) for part in stack.modules()) == ours
    ]


def _of_a_subclass(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__} is a subclass with code of its own"
