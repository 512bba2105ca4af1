"""Weights of a validated call, with gradients: in blocks, from the native kernel, and together with the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ._call.spec import AttentionCall
from ._environment import is_tracing, is_transformed
from .kernels._blocks import block_scores, block_weights, score_blocks
from .kernels._dispatch import choose
from .kernels._native import NativeKernel, native_results
from .kernels._native_statistics import native_weights, refuses_statistics
from .kernels._second_order import backward_pass
from .kernels._weights_gradient import weights_by_operations, weights_gradients, weights_inputs

__all__ = ["compute_weights", "has_one_pass", "in_one_pass"]


def has_one_pass(call: AttentionCall) -> bool:
    """Whether the native kernel gives output and weights together.

    Whatever the gradients: what checkpointing computes again must be the same to the last bit.
    """
    if call.dropout_p or call.query.dtype != torch.float32 or is_tracing() or is_transformed():
        return False
    return isinstance(choose(call), NativeKernel) and not refuses_statistics(call)


def in_one_pass(call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, Dv) and weights (B, H, L, S), or (B, L, S) averaged, of such a call."""
    output, _, weights = native_results(call, "mean" if average else "heads")
    return output, cast(Tensor, weights)


def compute_weights(call: AttentionCall, rows: Tensor | None, average: bool) -> Tensor:
    """Weights of a validated call; `rows` holds row numbers, ``None`` means all."""
    if is_tracing() or is_transformed():
        return weights_by_operations(call, rows, average)
    request = _Request(rows if rows is None else rows.to(call.query.device), average)
    inputs = weights_inputs(call)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return cast(Tensor, _Weights.apply(call, request, *inputs))
    return _forward(call, request)


@dataclass(frozen=True)
class _Request:
    rows: Tensor | None
    average: bool

    def count(self, call: AttentionCall) -> int:
        return call.grid.query_length if self.rows is None else len(self.rows)


class _Weights(torch.autograd.Function):
    """Recomputes blocks backward: with dp the gradient of p, ds = p (dp − Σ_j p dp)."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, request: _Request, *inputs: Tensor) -> Tensor:
        ctx.call = call.without_tensors()
        ctx.request = request
        ctx.save_for_backward(*inputs)
        return _forward(call, request)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs: tuple[Tensor, ...] = ctx.saved_tensors

        def call_of(query: Tensor, key: Tensor, *rest: Tensor) -> AttentionCall:
            return ctx.call.with_tensors(query, key, key, *rest)

        def own() -> tuple[Tensor, ...]:
            return weights_gradients(call_of(*inputs), ctx.request.rows, ctx.request.average, gradients[0])

        def recompute(*tensors: Tensor) -> tuple[Tensor]:
            return (weights_by_operations(call_of(*tensors), ctx.request.rows, ctx.request.average),)

        return backward_pass(ctx, gradients, inputs, own, recompute)


def _forward(call: AttentionCall, request: _Request) -> Tensor:
    native = native_weights(call, request.rows, request.average) if call.compute_dtype == torch.float32 else None
    if native is not None:
        return native
    batch, heads, keys = call.grid.batch_size, call.grid.num_heads, call.grid.key_length
    shape = (batch, request.count(call), keys) if request.average else (batch, heads, request.count(call), keys)
    result = call.query.new_zeros(shape, dtype=call.compute_dtype)
    for block, place, query, key in score_blocks(call, request.rows):
        weights, _ = block_weights(call, block, block_scores(call, block, query, key)[0])
        if request.average:
            result[block.batch, place, block.columns] += weights.sum(1) / heads
        else:
            result[block.batch, block.heads, place, block.columns] = weights
    return result
