"""Zeros in the padded outputs of an upgraded `nn.TransformerEncoder`, as PyTorch's fast path writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._environment import is_tracing
from .._torch_private import has_hook, left_aligned_padding, remove_hook

_ARGUMENTS = ("src", "mask", "src_key_padding_mask", "is_causal")


def drop_padding(encoder: nn.TransformerEncoder) -> None:
    """Zero padded outputs, before the last norm, wherever the encoder would have made its batch a nested tensor."""
    if not has_hook(encoder, _zero_padding):
        encoder.register_forward_hook(_zero_padding, with_kwargs=True)


def keep_padding(encoder: nn.TransformerEncoder) -> None:
    """Undo `drop_padding`."""
    remove_hook(encoder, _zero_padding)


def _zero_padding(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """Forward hook of an `nn.TransformerEncoder`."""
    arguments = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    src, padding = arguments["src"], arguments.get("src_key_padding_mask")
    if padding is None or arguments.get("mask") is not None or not _took_fast_path(encoder, src, padding):
        return None
    # PyTorch pads with zeros before the norm, which turns them into its bias.
    padded, norm = output.new_zeros(output.shape[-1]), getattr(encoder, "norm", None)
    return torch.where(padding.logical_not()[..., None], output, padded if norm is None else norm(padded))


def _took_fast_path(encoder: Any, src: Tensor, padding: Tensor) -> bool:
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
    return left_aligned_padding is not None and not is_tracing() and left_aligned_padding(src, padding.logical_not())
