"""PyTorch's flash attention for the CPU and its backward pass, on Clearhead's kernel.

`scaled_dot_product_attention` chooses between its kernels before it calls the operator, and so do graphs of
`torch.compile`. What it sends elsewhere never arrives here: dropout, float masks with gradients, operands of other than
four dimensions, values of another width, batches that broadcast, and rows with gaps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import get_kernel

from .._call.saved import restored
from ..errors import ArgumentError
from ..kernels._native_arguments import NativeArguments
from ..kernels._native_plan import plan_of
from ..kernels._native_returned import CPU, as_declared
from ._layouts import heads_inside, strides_like

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
#: PyTorch's own kernels, which the dispatcher has until Clearhead's are registered.
_pytorchs_forward = get_kernel(f"aten::{FORWARD}", "CPU").call_boxed
_pytorchs_backward = get_kernel(f"aten::{FORWARD}_backward", "CPU").call_boxed


class _Least(NamedTuple):
    """Multiplications of queries with keys from which Clearhead's kernel is faster. PyTorch's calls cost less.

    Measured by ``python -m benchmarks.cpu.activated``.
    """

    plain: float = math.inf
    masked: float = math.inf
    few_queries: float = math.inf
    backward: float = math.inf
    few_queries_backward: float = math.inf


_LEAST = {
    torch.float32: _Least(1 << 19, 1 << 21, 1 << 22, 1 << 22),
    torch.bfloat16: _Least(1 << 19, 1 << 20, 1 << 20, 1 << 19, 1 << 19),
    torch.float16: _Least(1 << 19, 1 << 20, 1 << 20, 1 << 19, 1 << 19),
}
_PYTORCHS = _Least()  # of other dtypes
_FEW = 4
#: A log-sum-exp up to this size is exact to 4e-6 in float32, so that weights have a relative error of that size.
_ROUNDED_WELL = 64.0


def _forward(
    keys: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """The output (B, H, L, D) and the log-sum-exp (B, H, L), laid out as PyTorch's. `keys` are the dispatcher's."""
    work, least = query.numel() * key.shape[2], _LEAST.get(query.dtype, _PYTORCHS)
    few = query.shape[2] < _FEW
    if work < least["attn_mask" in options] or (few and work < least.few_queries):
        return _pytorchs_forward(keys, query, key, value, *others, **options)
    # One kernel computes both passes: NaN in a hidden key reaches an output of PyTorch's, and its gradients.
    if work < _least_backward(least, few) and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _pytorchs_forward(keys, query, key, value, *others, **options)
    return _computed(query, key, value, *others, **options)


def _computed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _require_no_dropout(dropout_p)
    arguments = _arguments(query, key, value, is_causal, attn_mask, scale)
    plan = plan_of(arguments, output=strides_like(query.shape, query.stride()))
    exact = plan.empty_lse(query)
    output = plan.forward(arguments, exact)
    batch, heads, length = exact.shape
    lse = exact.new_empty((batch, length, heads), dtype=torch.float32).transpose(1, 2).copy_(exact)  # (B, H, L)
    if attn_mask is not None:  # PyTorch writes 0 for a fully masked row
        lse.masked_fill_(lse == -math.inf, 0)
    return output, lse


def _backward(keys: Any, output_gradient: Tensor, query: Tensor, key: Tensor, *others: Any, **options: Any) -> Any:
    """The gradients of query, key and value, laid out as PyTorch's, of an output of either kernel."""
    work, least = output_gradient.numel() * key.shape[2], _LEAST.get(output_gradient.dtype, _PYTORCHS)
    if work < _least_backward(least, output_gradient.shape[2] < _FEW):
        return _pytorchs_backward(keys, output_gradient, query, key, *others, **options)
    return _gradients(output_gradient, query, key, *others, **options)


def _gradients(
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
    _require_no_dropout(dropout_p)
    arguments = as_declared(_arguments(query, key, value, is_causal, attn_mask, scale), output_gradient)
    dtype, shape = output_gradient.dtype, output_gradient.shape
    output = restored("saved output", output, shape, dtype, CPU)
    lse = restored("saved log-sum-exp", lse, shape[:3], torch.float32, CPU)
    gradients = tuple(heads_inside(tensor.shape) for tensor in arguments[:3])
    plan = plan_of(arguments, differentiable=True, gradients=gradients)
    if dtype is torch.float32 and float(lse.abs().max()) <= _ROUNDED_WELL:
        exact = lse.double().contiguous()
    else:  # what came back is rounded too much
        exact = plan.empty_lse(arguments.query)
        output = plan.forward(arguments, exact)
    return plan.backward(arguments, output, exact, output_gradient)[:3]


KERNELS = {FORWARD: _forward, f"{FORWARD}_backward": _backward}


def _least_backward(least: _Least, few: bool) -> float:
    return least.few_queries_backward if few else least.backward


def _require_no_dropout(dropout_p: float) -> None:
    """`scaled_dot_product_attention` never sends dropout here. A call of the operator itself may."""
    if dropout_p:
        fix = "Call torch.nn.functional.scaled_dot_product_attention, which sends dropout to another kernel."
        raise ArgumentError("dropout_p", expected="0, as in PyTorch's own kernel", got=str(dropout_p), fix=fix)


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> NativeArguments:
    bias = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())].float()
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    return NativeArguments(query, key, value, bias=bias, scale=scale, high=0 if is_causal else None)
