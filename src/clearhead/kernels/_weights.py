"""Weights of a validated call, with gradients: in blocks, from the native kernel, and together with the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ._call.spec import AttentionCall
from ._environment import is_tracing, is_transformed
from .kernels._blocks import LongSum, block_scores, block_weights, grouped, grouped_transposed, score_blocks
from .kernels._dispatch import choose
from .kernels._native import NativeKernel, native_gradients
from .kernels._native_statistics import native_output_and_weights, native_weights, refuses_statistics
from .kernels._reference import reference_weights
from .kernels._second_order import backward_pass, reference_results

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
    if call.needs_gradients:
        return cast("tuple[Tensor, Tensor]", _OutputAndWeights.apply(call, average, *call.inputs))
    return native_output_and_weights(call, average)[:2]


def compute_weights(call: AttentionCall, rows: Tensor | None, average: bool) -> Tensor:
    """Weights of a validated call; `rows` holds row numbers, ``None`` means all."""
    if is_tracing() or is_transformed():
        return _reference(call, rows, average)
    request = _Request(rows if rows is None else rows.to(call.query.device), average)
    inputs = _inputs(call)
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
            return _backward(call_of(*inputs), ctx.request, gradients[0])

        def recompute(*tensors: Tensor) -> tuple[Tensor]:
            return (_reference(call_of(*tensors), ctx.request.rows, ctx.request.average),)

        return backward_pass(ctx, gradients, inputs, own, recompute)


class _OutputAndWeights(torch.autograd.Function):
    """One pass forward; backward the kernel's own and, if the weights have a gradient, `_Weights`'."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, average: bool, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.request = call.without_tensors(), _Request(None, average)
        ctx.set_materialize_grads(False)
        output, weights, lse = native_output_and_weights(call, average)
        ctx.save_for_backward(output, lse, *inputs)
        return output, weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        output, lse, *inputs = ctx.saved_tensors

        def own() -> list[Tensor | None]:
            found: list[Tensor | None] = [None] * len(inputs)
            call = ctx.call.with_tensors(*inputs)
            if gradients[0] is not None:
                found = native_gradients(call, output, lse, gradients[0], None, ctx.needs_input_grad)
            if gradients[1] is not None:
                query, key, *rest = _backward(call, ctx.request, gradients[1])
                found = [_sum(*both) for both in zip(found, (query, key, None, *rest), strict=True)]
            return found

        def recompute(*tensors: Tensor) -> tuple[Tensor | None, Tensor]:
            weights = _reference(ctx.call.with_tensors(*tensors), None, ctx.request.average)
            return reference_results(ctx.call)(*tensors)[0], weights

        return backward_pass(ctx, gradients, inputs, own, recompute)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


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


def _backward(call: AttentionCall, request: _Request, gradient: Tensor) -> tuple[Tensor, ...]:
    dtype, heads = call.compute_dtype, call.grid.num_heads
    query_gradient = torch.zeros_like(call.query, dtype=dtype)
    key_gradient, *sums = (LongSum(torch.zeros_like(tensor, dtype=dtype)) for tensor in _inputs(call)[1:])
    sinks_gradient, bias_gradients = (None, sums) if call.sinks is None else (sums[0], sums[1:])
    for block, place, query, key in score_blocks(call, request.rows):
        scores, squashed = block_scores(call, block, query, key)
        weights, lse = block_weights(call, block, scores)
        if request.average:
            weights_gradient = gradient[block.batch, None, place, block.columns].to(dtype) / heads
        else:
            weights_gradient = gradient[block.batch, block.heads, place, block.columns].to(dtype)
        mean = (weights * weights_gradient).sum(-1, keepdim=True)
        if call.sinks is not None and sinks_gradient is not None:
            share = (call.sinks[block.heads].to(dtype)[None, :, None, None] - lse).exp()
            sinks_gradient.run[block.heads] -= (share * mean).sum((0, 2, 3))
        scores_gradient = weights * (weights_gradient - mean)
        if call.mask is not None:
            call.mask.add_bias_gradients([each.run for each in bias_gradients], block, scores_gradient)
        if squashed is not None:
            scores_gradient.mul_(1 - squashed.square())
        scores_gradient.mul_(call.scale)
        target = query_gradient[block.batch, block.heads]
        rows = torch.arange(place.start, place.stop, device=query.device) if request.rows is None else block.rows
        target.index_add_(2, cast(Tensor, rows), grouped(scores_gradient, key))
        kv_heads = slice(block.heads.start // call.group, block.heads.stop // call.group)
        part = grouped_transposed(scores_gradient, query, key.shape[1])
        key_gradient.run[block.batch, kv_heads, block.columns] += part
        for each in (key_gradient, *sums):
            each.end_block()
    gradients = [query_gradient, key_gradient.result(), *(each.result() for each in sums)]
    return tuple(found.to(tensor.dtype) for found, tensor in zip(gradients, _inputs(call), strict=True))


def _reference(call: AttentionCall, rows: Tensor | None, average: bool) -> Tensor:
    weights = reference_weights(call)[0]
    if rows is not None:
        weights = weights.index_select(2, rows.to(weights.device))
    return weights.mean(1) if average else weights


def _inputs(call: AttentionCall) -> tuple[Tensor, ...]:
    sinks = () if call.sinks is None else (call.sinks,)
    return (call.query, call.key, *sinks, *call.bias_tensors)
