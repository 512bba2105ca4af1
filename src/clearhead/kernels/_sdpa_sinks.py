"""Learned sinks on PyTorch's fused kernels, which have none: their results are rescaled.

A row whose log-sum-exp without its sink is lse has o′ = o · exp(lse − lse′), lse′ = logaddexp(lse, sink). The backward
pass of a fused kernel computes the weights from its log-sum-exp, and Σ do · o from its output. Given lse′ and o′ it
returns the gradients with the sink. The gradient of the sink is −Σ exp(sink − lse′) (do · o′).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._call.layout import Layout
from ._base import Refusal, applicable
from ._second_order import sinks_gradient

_aten: Any = torch.ops.aten
_BACKENDS = ("cuDNN", "flash", "efficient", "cpu")


class Options(NamedTuple):
    """What PyTorch's kernel is told besides tensors.

    Args:
        backend: the kernel: ``"cuDNN"``, ``"flash"`` or ``"efficient"`` on CUDA devices, ``"cpu"`` on the CPU.
        dropout_p, is_causal, scale: as for `scaled_dot_product_attention`.
    """

    backend: str
    dropout_p: float
    is_causal: bool
    scale: float


def refusals_of_sinks(layout: Layout, backend: str) -> list[Refusal]:
    """Every reason against sinks where PyTorch takes a kernel."""
    padded = backend == "flash" and (layout.query[3] % 8 or layout.value[3] % 8) != 0
    return applicable(
        {
            "a graph cannot hold the operators behind PyTorch's function": layout.tracing or layout.symbolic,
            f"with sinks it runs on CUDA devices and the CPU, not on {layout.device.type}": (
                layout.device.type not in ("cpu", "cuda")
            ),
            "with sinks it takes no kernel of another library": backend not in _BACKENDS,
            "with sinks its flash attention takes multiples of 8 as head sizes": padded,
        }
    )


def attend_with_sinks(
    options: Options, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor
) -> Tensor:
    """The output (B, H, L, Dv) for sinks that broadcast to its rows (B, H, L)."""
    return _WithSinks.apply(options, query, key, value, bias, sinks)  # pyright: ignore


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Any) -> Tensor:
        query, key, value, bias, sinks = tensors
        if bias is not None:
            bias = bias.expand(*query.shape[:3], key.shape[2])  # as the kernels take it
        output, lse, *state = _forward(options, query, key, value, bias)
        of_rows = _of_rows(lse, query)
        output.mul_((of_rows - sinks).sigmoid()[..., None])  # exp(lse − lse′)
        if any(ctx.needs_input_grad):
            of_rows.copy_(torch.logaddexp(of_rows, sinks))
            ctx.options = options
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(query, key, value, bias, output, lse, sinks, *state)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:  # another function has computed all gradients (`allow_second_derivatives`)
            return (None,) * 6
        query, key, value, bias, output, lse, sinks, *state = ctx.saved_tensors
        of_operands = _backward(ctx.options, gradient, query, key, value, bias, output, lse, state)
        of_sinks = None
        if ctx.needs_input_grad[5]:
            correction = torch.linalg.vecdot(*(each.to(lse.dtype) for each in (gradient, output)))  # (B, H, L)
            of_sinks = sinks_gradient(sinks, correction, _of_rows(lse, query))
        return None, *of_operands, None, of_sinks


def _of_rows(lse: Tensor, query: Tensor) -> Tensor:
    """A view (B, H, L) of a log-sum-exp that cuDNN has as (B, H, L, 1), and memory-efficient attention fills up."""
    return (lse.squeeze(3) if lse.dim() == 4 else lse)[..., : query.shape[2]]


def _forward(options: Options, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """The output, the log-sum-exp as the kernel has it, and what its backward pass wants besides."""
    backend, *others, scale = options
    if backend == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, *others, attn_mask=bias, scale=scale
        )
    if backend == "efficient":
        return _aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, *others, scale=scale)
    if backend == "flash":
        found = _aten._scaled_dot_product_flash_attention(query, key, value, *others, False, scale=scale)
    else:
        found = _aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True, *others, False, scale=scale)
    return (*found[:4], *found[6:8])  # without the lengths, and the weights for debugging


def _backward(
    options: Options,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
    state: list[Any],
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value."""
    backend, *others, scale = options
    operands, results, lengths = (gradient, query, key, value), (output, lse), (query.shape[2], key.shape[2])
    if backend == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, *results, *others, attn_mask=bias, scale=scale
        )
    if backend == "efficient":
        wanted = [True, True, True, False]
        dropout_p, is_causal = others
        return _aten._scaled_dot_product_efficient_attention_backward(
            *operands, bias, *results, *state, dropout_p, wanted, is_causal, scale=scale
        )[:3]
    *bounds, seed, offset = state
    if backend == "flash":
        return _aten._scaled_dot_product_flash_attention_backward(
            *operands, *results, *bounds, *lengths, *others, seed, offset, scale=scale
        )
    return _aten._scaled_dot_product_cudnn_attention_backward(
        *operands, *results, seed, offset, bias, *bounds, *lengths, *others, scale=scale
    )
