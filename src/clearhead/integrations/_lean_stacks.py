"""Stacks of `clearhead.transformer` whose layers run in the loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._encoder.layers import LeanLayer, LeanLayers
from .._environment import is_tracing, read_environment
from .._multihead import MultiHeadAttention
from ..checkpoints._namings import Naming
from ..masks._base import Mask
from ..masks._tensors import as_mask
from ..transformer import Encoder, EncoderLayer, FeedForward, SwiGLU
from ._classes import forward_is, replace_forward
from ._lean import Loop
from ._lean_families import Family
from ._lean_reading import Parts, joined, read_layer

_LAYER = Family(
    "layers.{layer}.self_attention.",
    Naming.of_linears("clearhead", "q_proj", "k_proj", "v_proj", "out_proj"),
    ("feed_forward.linear1",),
    "feed_forward.linear2",
    ("norm1", "norm2"),
    "feed_forward.activation",
)
_GATED = ("feed_forward.gate_proj", "feed_forward.up_proj")
#: By the class of the feed-forward part.
_FAMILIES = {FeedForward: _LAYER, SwiGLU: replace(_LAYER, up=_GATED, down="feed_forward.down_proj", activation="")}


def stacks_in(model: nn.Module) -> dict[str, nn.Module]:
    """The stacks of a module whose forward nothing else has replaced, by their names."""
    stacks = {name: module for name, module in model.named_modules() if type(module) is Encoder}
    return {name: stack for name, stack in stacks.items() if runs_in_loop(stack) or "forward" not in vars(stack)}


def run_in_loop(stack: nn.Module, dtype: torch.dtype | None) -> str:
    """Let a stack run in the loop where a call allows it, on new copies. Returns how its layers run, for a report."""
    if runs_in_loop(stack):
        del stack.forward
    loop = Loop(dtype, read_stack)
    replace_forward(stack, _forward, loop)
    return loop.describe(stack)


def runs_in_loop(module: nn.Module) -> bool:
    """Whether `run_in_loop` was called for a module."""
    return forward_is(module, _forward)


_OWN_FORWARD = Encoder.forward


def _forward(stack: Any, loop: Loop, x: Tensor, **options: Any) -> Any:
    mask, forward = options.get("mask"), type(stack).forward
    asked = {name for name, value in options.items() if value is not None and value is not False}
    if is_tracing() or forward is not _OWN_FORWARD or not asked <= {"mask", "average_attn_weights"}:
        return forward(stack, x, **options)
    if not isinstance(mask, Mask | Tensor | None) or not isinstance(x, Tensor) or x.dim() != 3 or _learns(x, mask):
        return forward(stack, x, **options)
    environment = read_environment()
    layers = loop.layers_of(stack, environment)
    if layers is None or x.shape[-1] != layers.features or x.dtype != layers.parameters_dtype or not x.is_cpu:
        return forward(stack, x, **options)
    return layers.run(x, environment, mask=as_mask(mask) if isinstance(mask, Tensor) else mask).to(x.dtype)


def _learns(x: Tensor, mask: Mask | Tensor | None) -> bool:
    """Whether gradients of the input or of the mask are recorded."""
    tensors = [x, mask] if isinstance(mask, Tensor) else [x, *(() if mask is None else mask.bias_tensors())]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def read_stack(stack: Any, dtype: torch.dtype | None) -> tuple[LeanLayers, list[nn.Module]]:
    """The layers of a stack, and the modules whose code they replace.

    Raises:
        ValueError: with the reason why that code must run.
    """
    parts, first = Parts(dtype), stack.layers[0]
    if any(type(layer) is not EncoderLayer or layer.norm_first != first.norm_first for layer in stack.layers):
        raise ValueError("they are not EncoderLayers of one kind")
    last = parts.norm(stack.norm, "")
    if last is not None and not first.norm_first:
        raise ValueError("a post-norm stack has a norm of its own")
    layers = [_read_layer(parts, layer) for layer in stack.layers]
    modules = [module for module in stack.modules() if module is not stack]
    parts.require_known(modules, "")
    return joined(layers, first.norm_first, last), modules


def _read_layer(parts: Parts, layer: Any) -> LeanLayer:
    attention, family = layer.self_attention, _FAMILIES.get(type(layer.feed_forward))
    if type(attention) is not MultiHeadAttention or family is None:
        raise ValueError("a part is not clearhead's own")
    others = attention.position, attention.q_norm, attention.k_norm, attention.head_shard, attention.sequence_shard
    if any(part is not None for part in others):
        raise ValueError("an attention has positions, norms or shards of its own")
    if attention.mask is not None and any(bias.requires_grad for bias in attention.mask.bias_tensors()):
        raise ValueError("an attention learns a bias")
    scores = {name: getattr(attention, name) for name in ("scale", "softcap", "sinks")}
    return replace(read_layer(parts, layer, family, ""), mask=attention.mask, scores=scores)
