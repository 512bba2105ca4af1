"""Stacks of `clearhead.transformer` whose layers run in the loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._encoder.layers import LayerParts
from .._environment import is_tracing, read_environment
from .._multihead import MultiHeadAttention
from ..masks._base import Mask
from ..masks._tensors import as_mask
from ..transformer import Encoder, EncoderLayer, FeedForward, SwiGLU
from ._classes import forward_is, replace_forward
from ._lean import Reading, forget, lean_layers
from ._lean_reading import Parts, require_shapes


def stacks_in(model: nn.Module) -> dict[str, nn.Module]:
    """The stacks of a module whose forward nothing else has replaced, by their names."""
    stacks = {name: module for name, module in model.named_modules() if type(module) is Encoder}
    return {name: stack for name, stack in stacks.items() if runs_in_loop(stack) or "forward" not in vars(stack)}


def run_in_loop(stack: nn.Module, dtype: torch.dtype | None) -> None:
    """Let a stack run in the loop where a call allows it, on new copies."""
    if runs_in_loop(stack):
        run_by_itself(stack)
    replace_forward(stack, _forward, dtype)


def run_by_itself(stack: nn.Module) -> None:
    """Undo `run_in_loop`."""
    del stack.forward
    forget(stack)


def runs_in_loop(module: nn.Module) -> bool:
    """Whether `run_in_loop` was called for a module."""
    return forward_is(module, _forward)


_OWN_FORWARD = Encoder.forward


def _forward(stack: Any, dtype: torch.dtype | None, x: Tensor, **options: Any) -> Any:
    mask, forward = options.get("mask"), type(stack).forward
    asked = {name for name, value in options.items() if value is not None and value is not False}
    if is_tracing() or forward is not _OWN_FORWARD or not asked <= {"mask", "average_attn_weights"}:
        return forward(stack, x, **options)
    if not isinstance(mask, Mask | Tensor | None) or not isinstance(x, Tensor) or x.dim() != 3 or _learns(x, mask):
        return forward(stack, x, **options)
    environment = read_environment()
    layers = lean_layers(stack, dtype, environment, read_stack)
    if layers is None or x.shape[-1] != layers.features or x.dtype != layers.parameters_dtype or not x.is_cpu:
        return forward(stack, x, **options)
    return layers.run(x, environment, mask=as_mask(mask) if isinstance(mask, Tensor) else mask).to(x.dtype)


def _learns(x: Tensor, mask: Mask | Tensor | None) -> bool:
    """Whether gradients of the input or of the mask are recorded."""
    tensors = [x, mask] if isinstance(mask, Tensor) else [x, *(() if mask is None else mask.bias_tensors())]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def read_stack(stack: Any) -> Reading:
    """The layers of a stack.

    Raises:
        ValueError: with the reason why their own code must run.
    """
    parts, first = Parts(), stack.layers[0]
    if any(type(layer) is not EncoderLayer or layer.norm_first != first.norm_first for layer in stack.layers):
        raise ValueError("they are not EncoderLayers of one kind")
    last = parts.norm(stack.norm, "")
    if last is not None and not first.norm_first:
        raise ValueError("a post-norm stack has a norm of its own")
    layers = [_read_layer(parts, layer) for layer in stack.layers]
    modules = [module for module in stack.modules() if module is not stack]
    parts.require_known(modules, "")
    require_shapes(layers, last)
    return Reading(modules, layers, first.norm_first, last)


def _read_layer(parts: Parts, layer: Any) -> LayerParts:
    attention, feed_forward = layer.self_attention, layer.feed_forward
    if type(attention) is not MultiHeadAttention or type(feed_forward) not in (FeedForward, SwiGLU):
        raise ValueError("a part is not clearhead's own")
    others = attention.position, attention.q_norm, attention.k_norm, attention.head_shard, attention.sequence_shard
    if any(part is not None for part in others):
        raise ValueError("an attention has positions, norms or shards of its own")
    if attention.mask is not None and any(bias.requires_grad for bias in attention.mask.bias_tensors()):
        raise ValueError("an attention learns a bias")
    gated = type(feed_forward) is SwiGLU
    up = ("gate_proj", "up_proj") if gated else ("linear1",)
    return LayerParts(
        tuple(parts.affine(attention, name) for name in ("q_proj", "k_proj", "v_proj")),
        parts.affine(attention, "out_proj"),
        tuple(parts.affine(feed_forward, name) for name in up),
        nn.functional.silu if gated else parts.activation(feed_forward.activation),
        parts.affine(feed_forward, "down_proj" if gated else "linear2"),
        parts.norm(layer.norm1, ""),
        parts.norm(layer.norm2, ""),
        (attention.num_heads, attention.num_kv_heads),
        attention.mask,
        scores={"scale": attention.scale, "softcap": attention.softcap, "sinks": attention.sinks},
    )
