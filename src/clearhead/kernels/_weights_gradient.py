"""Gradients of attention weights, recomputed in blocks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .._call.call import Call
from ..masks._grid import take
from ._base import of_rows
from ._block_weights import block_weights, product_gradient
from ._blocks import LongSum, block_scores, block_sinks, grouped, grouped_transposed, score_blocks
from ._reference import reference_weights


def weights_gradients(call: Call, chosen: Tensor | None, average: bool, gradient: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `weights_inputs` from that of the weights, in blocks: with dp that of p, ds = p (dp − Σ_j p dp)."""
    dtype, heads = call.layout.compute_dtype, call.grid.num_heads
    query_gradient = torch.zeros_like(call.query, dtype=dtype)
    key_gradient, *sums = (LongSum(torch.zeros_like(tensor, dtype=dtype)) for tensor in weights_inputs(call)[1:])
    sinks_gradient, bias_gradients = (None, sums) if call.sinks is None else (sums[0], sums[1:])
    for block, place, query, key in score_blocks(call, chosen):
        scores, tanh = block_scores(call, block, query, key)
        weights, lse = block_weights(call, block, scores)
        if average:
            weights_gradient = gradient[block.batch, None, place, block.columns].to(dtype) / heads
        else:
            weights_gradient = gradient[block.batch, block.heads, place, block.columns].to(dtype)
        # A row may be chosen more than once: its gradients add up.
        every = torch.arange(place.start, place.stop, device=query.device)
        rows = every if chosen is None else cast(Tensor, block.rows)
        mean = (weights * weights_gradient).sum(-1, keepdim=True)
        sinks = block_sinks(call, block, dtype)
        if sinks is not None and sinks_gradient is not None:
            of_sinks = ((sinks - lse).exp() * mean).sum_to_size(sinks.shape).squeeze(-1)  # (1 or b, h, 1 or l)
            total = take(take(of_rows(sinks_gradient.run), 0, block.batch), 1, block.heads)
            if total.shape[2] == 1:
                total -= of_sinks
            else:
                total.index_add_(2, rows, of_sinks, alpha=-1)
        scores_gradient = weights * (weights_gradient - mean)
        product_gradient(call, block, scores_gradient, tanh, bias_gradients)
        target = query_gradient[block.batch, block.heads]
        target.index_add_(2, rows, grouped(scores_gradient, key))
        kv_heads = slice(block.heads.start // call.layout.group, block.heads.stop // call.layout.group)
        of_block = grouped_transposed(scores_gradient, query, key.shape[1])
        key_gradient.run[block.batch, kv_heads, block.columns] += of_block
        for long_sum in (key_gradient, *sums):
            long_sum.end_block()
    gradients = [query_gradient, key_gradient.result(), *(long_sum.result() for long_sum in sums)]
    return tuple(total.to(tensor.dtype) for total, tensor in zip(gradients, weights_inputs(call), strict=True))


def weights_by_operations(call: Call, rows: Tensor | None, average: bool) -> Tensor:
    """Weights (B, H, n, S), or their mean over heads (B, n, S), by PyTorch's operations."""
    weights = reference_weights(call)[0]
    if rows is not None:
        weights = weights.index_select(2, rows.to(weights.device))
    return weights.mean(1) if average else weights


def weights_inputs(call: Call) -> tuple[Tensor, ...]:
    """The tensors that weights depend on."""
    sinks = () if call.sinks is None else (call.sinks,)
    return (call.query, call.key, *sinks, *call.bias_tensors)
