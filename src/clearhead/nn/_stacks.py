"""PyTorch's stacks with upgraded attention: masks shared by the layers, and zeros in padded outputs.

Masks are translated and lowered once per forward, and dropped at its end. An `nn.TransformerEncoder` zeroes its padded
outputs, as PyTorch's fast path does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from .._environment import is_tracing
from .._torch_private import has_hook, left_aligned_padding, remove_hook
from ..masks._base import Mask
from ..masks._prepared import shared

#: Modules that pass the same mask tensors to all their layers.
STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


class _Forwards(threading.local):
    #: For each running forward, mask tensors and their translation.
    running: tuple[dict[Hashable, tuple[object, Mask | None]], ...] = ()


_forwards = _Forwards()


def share_masks(stack: nn.Module) -> None:
    """Let the attention modules of a stack share their translated masks, from now on."""
    if not has_hook(stack, _begin):
        stack.register_forward_pre_hook(_begin)
        stack.register_forward_hook(_end, always_call=True)


def stop_sharing(stack: nn.Module) -> None:
    """Undo `share_masks`."""
    remove_hook(stack, _begin)
    remove_hook(stack, _end)


def shared_in_forward(
    tensors: tuple[Tensor | None, ...], settings: Hashable, translate: Callable[[], Mask | None]
) -> Mask | None:
    """The mask that `translate` returns, shared by the layers of the stack whose forward runs.

    The translation depends on the mask tensors of the call and on `settings`. The tensors are kept until the forward
    ends, so that no id is used twice.
    """
    # Tensors of a graph do not exist outside it.
    if not _forwards.running or is_tracing():
        return translate()
    masks = _forwards.running[-1]
    # By identity, because comparing values would cost what sharing saves.
    key = tuple(map(id, tensors)), settings
    if key not in masks:
        masks[key] = tensors, shared(translate())
    return masks[key][1]


def _begin(module: nn.Module, args: tuple[Any, ...]) -> None:
    if not is_tracing():
        _forwards.running = (*_forwards.running, {})


def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not is_tracing():
        _forwards.running = _forwards.running[:-1]


_ARGUMENTS = ("src", "mask", "src_key_padding_mask", "is_causal")


def zero_padding(encoder: nn.TransformerEncoder) -> None:
    """Zero padded outputs, before the last norm, wherever the encoder would have made its batch a nested tensor."""
    if not has_hook(encoder, _zero_padding):
        encoder.register_forward_hook(_zero_padding, with_kwargs=True)


def stop_zeroing(encoder: nn.TransformerEncoder) -> None:
    """Undo `zero_padding`."""
    remove_hook(encoder, _zero_padding)


def _zero_padding(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """Forward hook of an `nn.TransformerEncoder`."""
    arguments = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    src, mask = arguments["src"], arguments.get("src_key_padding_mask")
    if mask is None or arguments.get("mask") is not None:
        return None
    # A float mask is added to the scores: only −∞ hides a token.
    visible = mask != -torch.inf if mask.is_floating_point() else mask.logical_not()
    if not _took_fast_path(encoder, src, visible):
        return None
    # PyTorch pads with zeros before the norm, which turns them into its bias.
    padded, norm = output.new_zeros(output.shape[-1]), getattr(encoder, "norm", None)
    return torch.where(visible[..., None], output, padded if norm is None else norm(padded))


def _took_fast_path(encoder: Any, src: Tensor, visible: Tensor) -> bool:
    """Whether `nn.TransformerEncoder.forward` would have removed the padding if its layers allowed it."""
    layer = encoder.layers[0]  # the only one that PyTorch checks
    if not torch.backends.mha.get_fastpath_enabled() or layer.training or src.dim() != 3 or src.is_nested:
        return False
    if torch.is_autocast_enabled() or torch.overrides.has_torch_function((src,)):
        return False
    if torch.is_grad_enabled() and (src.requires_grad or any(x.requires_grad for x in layer.parameters())):
        return False
    if not getattr(encoder, "mask_check", True):
        return True
    return left_aligned_padding is not None and not is_tracing() and left_aligned_padding(src, visible)
