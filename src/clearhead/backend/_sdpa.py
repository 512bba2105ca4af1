"""PyTorch's flash attention for the CPU and its backward pass, on Clearhead's kernel.

`scaled_dot_product_attention` chooses between its kernels before it calls the operator, and so do graphs of
`torch.compile`. What it sends elsewhere never arrives here: dropout, float masks with gradients, operands of other than
four dimensions, values of another width, batches that broadcast, and rows with gaps.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import get_kernel

from .._call.saved import restored
from ..kernels._native_arguments import DTYPES, NativeArguments, Strides
from ..kernels._native_plan import plan_of
from ..kernels._native_returned import CPU, as_declared

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
#: PyTorch's own kernels, which the dispatcher has until Clearhead's are registered.
_pytorchs_forward = get_kernel(f"aten::{FORWARD}", "CPU").call_boxed
_pytorchs_backward = get_kernel(f"aten::{FORWARD}_backward", "CPU").call_boxed

#: Multiplications of queries with keys below which PyTorch's kernel is faster, since its call costs less. Measured by
#: ``python -m benchmarks.activated``.
_SMALL = 1 << 21
#: A log-sum-exp up to this size is exact to 4e-6 in float32, so that weights have a relative error of that size.
_ROUNDED_WELL = 64.0


def _forward(
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, L, D) and the log-sum-exp (B, H, L), laid out as PyTorch's. `keys` are the dispatcher's."""
    if _is_pytorchs(query, key, dropout_p):
        return _pytorchs_forward(keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    arguments = _arguments(query, key, value, is_causal, attn_mask, scale)
    plan = plan_of(arguments, output=_strides_like(query.shape, query.stride()))
    exact = plan.empty_lse(query)
    output = plan.forward(arguments, exact)
    batch, heads, length = exact.shape
    lse = exact.new_empty((batch, length, heads), dtype=torch.float32).transpose(1, 2).copy_(exact)  # (B, H, L)
    if attn_mask is not None:  # PyTorch writes 0 for a fully masked row
        lse.masked_fill_(lse == -math.inf, 0)
    return output, lse


def _backward(
    keys: Any,
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, laid out as PyTorch's."""
    if _is_pytorchs(output_gradient, key, dropout_p):
        operands = query, key, value, output, lse
        return _pytorchs_backward(
            keys, output_gradient, *operands, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
    arguments = as_declared(_arguments(query, key, value, is_causal, attn_mask, scale), output_gradient)
    dtype, shape = output_gradient.dtype, output_gradient.shape
    output = restored("saved output", output, shape, dtype, CPU)
    lse = restored("saved log-sum-exp", lse, shape[:3], torch.float32, CPU)
    gradients = tuple(_heads_inside(tensor.shape) for tensor in arguments[:3])
    plan = plan_of(arguments, differentiable=True, gradients=gradients)
    if dtype is torch.float32 and float(lse.abs().max()) <= _ROUNDED_WELL:
        exact = lse.double().contiguous()
    else:  # what came back is rounded too much
        exact = plan.empty_lse(arguments.query)
        output = plan.forward(arguments, exact)
    return plan.backward(arguments, output, exact, output_gradient)[:3]


KERNELS = {FORWARD: _forward, f"{FORWARD}_backward": _backward}


def _is_pytorchs(query: Tensor, key: Tensor, dropout_p: float) -> bool:
    """Whether PyTorch's own kernel computes the call: a small one, or one that Clearhead's kernel does not support."""
    batch, heads, length, dim = query.shape
    return batch * heads * length * key.shape[2] * dim < _SMALL or query.dtype not in DTYPES or dropout_p > 0


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> NativeArguments:
    bias = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())].float()
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    return NativeArguments(query, key, value, bias=bias, scale=scale, high=0 if is_causal else None)


@lru_cache(256)
def _strides_like(shape: tuple[int, ...], strides: Strides) -> Strides:
    """The strides of `torch.empty_like`, which PyTorch's kernel and the graphs of its compiler use for the output."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


@lru_cache(256)
def _heads_inside(shape: tuple[int, ...]) -> Strides:
    """The strides of a contiguous (B, L, H, D) tensor, which PyTorch's kernel uses for gradients (B, H, L, D)."""
    return torch.empty_permuted(shape, (0, 2, 1, 3), device="meta").stride()
