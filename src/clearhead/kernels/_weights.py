"""Weights of a validated call, from the native kernel, from a Triton kernel or in blocks, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import Call
from .._environment import autocast_off, is_tracing
from ._base import Kernel
from ._block_weights import block_weights
from ._blocks import BLOCK_FORMULA, block_scores, exact_dtype, score_blocks
from ._native_statistics import native_weights
from ._second_order import Differentiable, backward_pass
from ._triton_check import triton_refusals
from ._weights_gradient import weights_by_operations, weights_gradients, weights_inputs


def compute_weights(call: Call, rows: Tensor | None, average: bool, forced: Kernel | None = None) -> Tensor:
    """Weights of a validated call.

    Args:
        call: the validated call.
        rows: row numbers, or ``None`` for all.
        average: whether to average over the heads.
        forced: the kernel of `use_kernel`, or ``None``.
    """
    name = None if forced is None else forced.name
    in_blocks = not call.layout.formula - BLOCK_FORMULA
    if call.layout.tracing or call.layout.transformed or name == "reference" or not in_blocks:
        return weights_by_operations(call, rows, average)
    # No other kernel may replace a forced one.
    chosen = _Chosen(_placed(rows, call), average, natively=name in (None, "native"))
    inputs = weights_inputs(call)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return cast(Tensor, _Weights.apply(call, chosen, *inputs))
    return _forward(call, chosen)


def exact_weights(call: Call, rows: Tensor | None, head: int | None = None) -> Tensor:
    """Weights of chosen rows, (B, H, n, S) or (B, n, S) of one head, without gradients, scored in `exact_dtype`."""
    with torch.no_grad(), autocast_off(call.query):
        # Tracing needs PyTorch's own operators. A kept call may be traced later.
        return _forward(call, _Chosen(_placed(rows, call), head=head, exact=True, natively=not is_tracing()))


def _placed(rows: Tensor | None, call: Call) -> Tensor | None:
    return None if rows is None else rows.to(call.query.device, non_blocking=True)


@dataclass(frozen=True)
class _Chosen:
    """Which weights are computed, and how.

    Args:
        rows: row numbers, or ``None`` for all.
        average: whether to average over the heads.
        head: number of the only head, or ``None`` for all.
        exact: whether to score in `exact_dtype`.
        natively: whether `native` and the Triton kernels may run.
    """

    rows: Tensor | None
    average: bool = False
    head: int | None = None
    exact: bool = False
    natively: bool = True


class _Weights(torch.autograd.Function):
    """Recomputes blocks backward: with dp the gradient of p, ds = p (dp − Σ_j p dp)."""

    @staticmethod
    def forward(ctx: Any, call: Call, chosen: _Chosen, *inputs: Tensor) -> Tensor:
        read_again = call.read_again
        ctx.rebuild, ctx.chosen = call.rebuild(read_again), chosen
        ctx.save_for_backward(*inputs, *read_again)
        return _forward(call, chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, *others = ctx.saved_tensors

        def restore() -> Call:
            return ctx.rebuild(query, key, key, *others)

        def fused(call: Call) -> tuple[Tensor | None, ...]:
            return _gradients(call, ctx.chosen, gradients[0])

        def by_operations(call: Call) -> Differentiable:
            rebuild = call.rebuild()

            def weights(query: Tensor, key: Tensor, *parameters: Tensor) -> tuple[Tensor]:
                again = rebuild(query, key, key, *parameters)
                return (weights_by_operations(again, ctx.chosen.rows, ctx.chosen.average),)

            return weights_inputs(call), weights

        return backward_pass(ctx, gradients, restore, fused, by_operations)


def _forward(call: Call, chosen: _Chosen) -> Tensor:
    rows, head = chosen.rows, chosen.head
    dtype = exact_dtype(call) if chosen.exact else call.layout.compute_dtype
    # The native kernel returns float32.
    if chosen.natively and call.layout.compute_dtype == torch.float32:
        native = native_weights(call, rows, chosen.average, head=head, exact=dtype == torch.float64)
        if native is not None:
            return native if head is None else native[:, 0]  # (B, n, S)
    if chosen.natively and not triton_refusals(call):
        from . import _triton_statistics  # imports Triton

        return _triton_statistics.weights(call, rows, chosen.average, head)
    heads, count = call.grid.num_heads, call.grid.query_length if rows is None else len(rows)
    shape = (call.grid.batch_size, heads, count, call.grid.key_length)
    # Zeros, because blocks skip masked columns.
    result = call.query.new_zeros(shape[:1] + shape[2:] if chosen.average else shape, dtype=call.layout.compute_dtype)
    for block, place, query, key in score_blocks(call, rows, dtype):
        scores, _ = block_scores(call, block, query, key)
        weights, _ = block_weights(call, block, scores, overflows=True)
        if chosen.average:
            result[block.batch, place, block.columns] += weights.sum(1) / heads
        else:
            result[block.batch, block.heads, place, block.columns] = weights
    return result if head is None else result[:, head]  # (B, n, S)


def _gradients(call: Call, chosen: _Chosen, gradient: Tensor) -> tuple[Tensor | None, ...]:
    # The Triton kernels compute no gradient of a bias.
    if chosen.natively and not any(bias.requires_grad for bias in call.bias_tensors) and not triton_refusals(call):
        from . import _triton_statistics  # imports Triton

        return _triton_statistics.weights_gradients(call, chosen.rows, chosen.average, gradient)
    return weights_gradients(call, chosen.rows, chosen.average, gradient)
