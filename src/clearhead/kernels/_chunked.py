"""Pure PyTorch in O(L) memory: blocks of rows forward, the same blocks recomputed backward.

The guarantee that nothing ever builds (B, H, L, S): any mask, any device, dropout included.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from .._call.call import Call, Results
from .._call.layout import Layout
from .._call.saved import restored
from ..masks._bound import BoundMask
from ..masks._grid import Block
from ._base import Kernel, Plan, Refusal
from ._block_weights import block_share, block_softmax, block_weights, product_gradient
from ._blocks import (
    BLOCK_FORMULA,
    HeadSpan,
    LongSum,
    Workspace,
    block_scores,
    grouped,
    grouped_transposed,
    head_spans,
    span_blocks,
)
from ._gathered import gathered_forward, gathered_gradients, gathers
from ._second_order import backward_pass, by_reference, sinks_gradient


@final
class ChunkedKernel(Kernel):
    """Blocks of rows, each with a softmax over all its visible keys."""

    name: ClassVar[str] = "chunked"
    twice_differentiable: ClassVar[bool] = True
    formula: ClassVar[frozenset[str]] = BLOCK_FORMULA

    def refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        if layout.tracing:
            return (Refusal("its loop over blocks would tie a traced graph to one length"),)
        if layout.transformed:
            return (Refusal("its own backward cannot be transformed by torch.func or derived forwards"),)
        return ()

    def weights_refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        return ()

    def plan(self, layout: Layout, bound: BoundMask) -> Plan:
        return _compute_with_gradients if layout.gradients else _compute


def _compute(call: Call) -> Results:
    lse = _empty_lse(call) if call.layout.lse else None
    return Results(_forward(call, lse), lse)


def _compute_with_gradients(call: Call) -> Results:
    output, lse = cast("tuple[Tensor, Tensor]", _Chunked.apply(call, *call.inputs))
    return Results(output, lse if call.layout.lse else None)


class _Chunked(torch.autograd.Function):
    """Saves inputs, output and lse; the backward pass recomputes each block's weights from them."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        lse = _empty_lse(call)
        output = _forward(call, lse)
        read_again = call.read_again
        ctx.rebuild = call.rebuild(read_again)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(lse, *inputs, *read_again)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        lse, *saved = ctx.saved_tensors

        def by_blocks(call: Call) -> tuple[Tensor | None, ...]:
            layout = call.layout
            whole_lse = restored("saved lse", lse, layout.query[:3], layout.compute_dtype, layout.device)
            if _gathers(call):
                return gathered_gradients(call, whole_lse, *gradients)
            return chunked_gradients(call, whole_lse, *gradients)

        return backward_pass(ctx, gradients, lambda: ctx.rebuild(*saved), by_blocks, by_reference)


def _gathers(call: Call) -> bool:
    """Whether the keys that the call selects are gathered, which gives no gradient of a bias."""
    return call.mask is not None and gathers(call.bound) and not call.layout.learns_bias


def _empty_lse(call: Call) -> Tensor:
    return call.query.new_empty(call.query.shape[:3], dtype=call.layout.compute_dtype)


def _forward(call: Call, lse: Tensor | None) -> Tensor:
    """Return the output, and write lse (B, H, L) unless it is ``None``."""
    if _gathers(call):
        return gathered_forward(call, lse)
    output = call.value.new_empty(*call.query.shape[:3], call.value.shape[-1])
    workspace = Workspace()
    for span in head_spans(call):
        query, key, value = _span_tensors(call, span)
        for rows, block in span_blocks(call, span):
            scores, _ = block_scores(call, block, query[:, :, rows], key[:, :, block.columns], workspace)
            if lse is None:
                weights = block_softmax(call, block, scores)
            else:
                weights, block_lse = block_weights(call, block, scores)
                span.query(lse)[:, :, rows] = block_lse.squeeze(-1)
            if call.seed is not None:
                weights *= call.dropout_factors(block, weights.dtype)
            span.query(output)[:, :, rows] = grouped(weights, value[:, :, block.columns]).to(output.dtype)
    return output


def chunked_gradients(
    call: Call,
    lse: Tensor,
    output_gradient: Tensor | None,
    lse_gradient: Tensor | None,
    of_all_keys: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, sinks (if any) and every bias tensor, in the order of `call.inputs`.

    ::

        dp = dO vᵀ (dropped as p was),   δ = Σ_j p dp,   ds = p (dp − δ + dl)

    dO is the output's gradient and dl is that of lse. δ is a sum over the block and not dO·o, because o may be
    rounded. A call with some keys of a larger call passes δ as `of_all_keys`, and `lse` is that of all keys.
    """
    if output_gradient is None:
        output_gradient = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
    if lse_gradient is None:
        lse_gradient = torch.zeros_like(lse)
    dtype = call.layout.compute_dtype
    query_gradient, key_gradient, value_gradient = map(torch.empty_like, (call.query, call.key, call.value))
    biases = [LongSum(torch.zeros_like(tensor, dtype=dtype)) for tensor in call.bias_tensors]
    correction = torch.empty_like(lse) if of_all_keys is None else of_all_keys  # δ − dl, (B, H, L)
    workspace, gradient_workspace = Workspace(), Workspace()
    for span in head_spans(call):
        query, key, value = _span_tensors(call, span)
        keys, values = LongSum(torch.zeros_like(key)), LongSum(torch.zeros_like(value))
        for rows, block in span_blocks(call, span):
            rows_query, rows_key = query[:, :, rows], key[:, :, block.columns]
            scores, tanh = block_scores(call, block, rows_query, rows_key, workspace)
            if of_all_keys is None:  # weights from lse would have its rounding as a relative error
                weights = block_softmax(call, block, scores)
            else:
                weights = block_share(call, scores, span.query(lse)[:, :, rows])
            gradient = span.query(output_gradient)[:, :, rows].to(dtype)
            rows_value = value[:, :, block.columns].transpose(-2, -1)
            scores_gradient = grouped(gradient, rows_value, workspace=gradient_workspace)  # dp (b, h, l, s)
            dropped = _dropped(call, block, weights, scores_gradient)
            values.run[:, :, block.columns] += grouped_transposed(dropped, gradient, key.shape[1])
            if of_all_keys is None:
                delta = torch.linalg.vecdot(weights, scores_gradient) - span.query(lse_gradient)[:, :, rows]
                span.query(correction)[:, :, rows] = delta
            scores_gradient.sub_(span.query(correction)[:, :, rows, None]).mul_(weights)  # ds
            product_gradient(call, block, scores_gradient, tanh, biases)
            span.query(query_gradient)[:, :, rows] = grouped(scores_gradient, rows_key).to(query_gradient.dtype)
            keys.run[:, :, block.columns] += grouped_transposed(scores_gradient, rows_query, key.shape[1])
            for sums in (keys, values, *biases):
                sums.end_block()
        span.key(key_gradient).copy_(keys.result())
        span.key(value_gradient).copy_(values.result())
    sinks = () if call.sinks is None else (sinks_gradient(call.sinks, correction, lse),)
    bias_gradients = (sums.result().to(tensor.dtype) for sums, tensor in zip(biases, call.bias_tensors, strict=True))
    return (query_gradient, key_gradient, value_gradient, *sinks, *bias_gradients)


def _dropped(call: Call, block: Block, weights: Tensor, gradient: Tensor) -> Tensor:
    """The weights after dropout. Their gradient gets the same dropout, in place."""
    if call.seed is None:
        return weights
    factors = call.dropout_factors(block, weights.dtype)
    gradient *= factors
    return weights * factors


def _span_tensors(call: Call, span: HeadSpan) -> tuple[Tensor, Tensor, Tensor]:
    """The span's query, key and value in the compute dtype, laid out for matrix products."""
    dtype = call.layout.compute_dtype
    return (
        span.query(call.query).to(dtype),
        span.key(call.key).to(dtype).contiguous(),
        span.key(call.value).to(dtype).contiguous(),
    )
