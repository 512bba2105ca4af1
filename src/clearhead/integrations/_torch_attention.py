"""PyTorch's attention modules inside a model, and the stacks that they are in: Clearhead's class, and back."""

from __future__ import annotations

from torch import nn

from .._environment import remove_hook
from ..nn._encoder import drop_padding, keep_padding
from ..nn._multihead_attention import MultiheadAttention, keep_off_fast_path
from ..nn._sharing import STACKS, share_masks, stop_sharing

_NESTED_BEFORE = "_clearhead_use_nested_tensor"


def swap_attention(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Make every `nn.MultiheadAttention` Clearhead's.

    Returns:
        The names of those that were swapped, and why others were not.
    """
    changed: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
            module.register_forward_pre_hook(keep_off_fast_path)
            changed.append(name)
        elif isinstance(module, MultiheadAttention):
            left[name] = "it is Clearhead's already"
        elif isinstance(module, nn.MultiheadAttention):
            left[name] = _of_a_subclass(module)
    for module in model.modules():
        if isinstance(module, STACKS) and _holds_ours(module):
            share_masks(module)
    return changed, left


def swap_attention_back(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Undo `swap_attention`."""
    changed: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is MultiheadAttention:
            remove_hook(module, keep_off_fast_path)
            module.__class__ = nn.MultiheadAttention  # pyright: ignore[reportAttributeAccessIssue]
            changed.append(name)
        elif isinstance(module, MultiheadAttention):
            left[name] = _of_a_subclass(module)
    for module in model.modules():
        if isinstance(module, STACKS) and not _holds_ours(module):
            stop_sharing(module)
    return changed, left


def nested_off(model: nn.Module) -> tuple[str, ...]:
    """`nn.TransformerEncoder` turns padded batches into nested tensors, which only its fast path can compute with."""
    encoders: list[str] = []
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.TransformerEncoder)
            and getattr(module, "use_nested_tensor", False)
            and _holds_ours(module)
        ):
            setattr(module, _NESTED_BEFORE, True)
            module.use_nested_tensor = False
            drop_padding(module)
            encoders.append(name)
    return tuple(encoders)


def nested_back(model: nn.Module) -> tuple[str, ...]:
    encoders: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder) and hasattr(module, _NESTED_BEFORE) and not _holds_ours(module):
            delattr(module, _NESTED_BEFORE)
            module.use_nested_tensor = True
            keep_padding(module)
            encoders.append(name)
    return tuple(encoders)


def _holds_ours(module: nn.Module) -> bool:
    return any(isinstance(part, MultiheadAttention) for part in module.modules())


def _of_a_subclass(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__} is a subclass with code of its own"
