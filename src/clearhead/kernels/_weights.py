"""Weights of a validated call, with gradients: from the native kernel, or in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import AttentionCall
from .._environment import is_tracing, is_transformed
from ._base import Kernel
from ._block_weights import block_weights
from ._blocks import block_scores, score_blocks
from ._native_statistics import native_weights
from ._second_order import backward_pass
from ._weights_gradient import weights_by_operations, weights_gradients, weights_inputs


def compute_weights(call: AttentionCall, rows: Tensor | None, average: bool, forced: Kernel | None = None) -> Tensor:
    """Weights of a validated call.

    Args:
        call: of which.
        rows: row numbers; ``None`` for all.
        average: over the heads.
        forced: the kernel that has to compute them, or ``None``.
    """
    name = None if forced is None else forced.name
    if is_tracing() or is_transformed() or name == "reference":
        return weights_by_operations(call, rows, average)
    # The native kernel gives float32, and a forced kernel must not be stood in for.
    natively = name in (None, "native") and call.spec.compute_dtype == torch.float32
    chosen = _Chosen(rows if rows is None else rows.to(call.query.device), average, natively)
    inputs = weights_inputs(call)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return cast(Tensor, _Weights.apply(call, chosen, *inputs))
    return _forward(call, chosen)


@dataclass(frozen=True)
class _Chosen:
    """Which rows, ``None`` for all, whether their weights are averaged over the heads, and whether `native` may run."""

    rows: Tensor | None
    average: bool
    natively: bool

    def count(self, call: AttentionCall) -> int:
        return call.grid.query_length if self.rows is None else len(self.rows)


class _Weights(torch.autograd.Function):
    """Recomputes blocks backward: with dp the gradient of p, ds = p (dp − Σ_j p dp)."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, chosen: _Chosen, *inputs: Tensor) -> Tensor:
        ctx.rebuild, ctx.chosen, ctx.count = call.rebuild, chosen, len(inputs)
        ctx.save_for_backward(*inputs, *call.read_again)
        return _forward(call, chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs: tuple[Tensor, ...] = ctx.saved_tensors[: ctx.count]

        def call_of(query: Tensor, key: Tensor, *rest: Tensor) -> AttentionCall:
            return ctx.rebuild(query, key, key, *rest)

        def by_blocks() -> tuple[Tensor, ...]:
            return weights_gradients(call_of(*inputs), ctx.chosen.rows, ctx.chosen.average, gradients[0])

        def recompute(*tensors: Tensor) -> tuple[Tensor]:
            return (weights_by_operations(call_of(*tensors), ctx.chosen.rows, ctx.chosen.average),)

        return backward_pass(ctx, gradients, inputs, by_blocks, recompute)


def _forward(call: AttentionCall, chosen: _Chosen) -> Tensor:
    native = native_weights(call, chosen.rows, chosen.average) if chosen.natively else None
    if native is not None:
        return native
    batch, heads, keys = call.grid.batch_size, call.grid.num_heads, call.grid.key_length
    shape = (batch, chosen.count(call), keys) if chosen.average else (batch, heads, chosen.count(call), keys)
    result = call.query.new_zeros(shape, dtype=call.spec.compute_dtype)
    for block, place, query, key in score_blocks(call, chosen.rows):
        weights, _ = block_weights(call, block, block_scores(call, block, query, key)[0])
        if chosen.average:
            result[block.batch, place, block.columns] += weights.sum(1) / heads
        else:
            result[block.batch, block.heads, place, block.columns] = weights
    return result
