"""The textbook formula: any call, any dtype, differentiable twice. Tests compare every other kernel with it."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from .._call.call import Call, Results
from .._call.heads import fold_group, unfold_group
from .._call.layout import FORMULA, Layout
from ..masks._bound import BoundMask
from ..masks._grid import Block
from ._base import Kernel, Plan, Refusal, of_rows


@final
class ReferenceKernel(Kernel):
    """softmax(scale · q kᵀ + bias) v, with the whole (B, H, L, S) tensor in memory."""

    name: ClassVar[str] = "reference"
    twice_differentiable: ClassVar[bool] = True
    formula: ClassVar[frozenset[str]] = frozenset(FORMULA)

    def refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        return ()

    def weights_refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        return ()

    def gives_weights(self, layout: Layout, bound: BoundMask) -> bool:
        return True

    def plan(self, layout: Layout, bound: BoundMask) -> Plan:
        return reference_results


def reference_results(call: Call) -> Results:
    """The output, and the log-sum-exp and weights if the layout asks for them, by PyTorch's operations."""
    weights, lse = reference_weights(call)  # (B, H, L, S), (B, H, L)
    returned = weights.mean(1) if call.layout.weights == "average" else weights  # (B, L, S)
    if call.seed is not None:
        weights = weights * call.dropout_factors(Block(call.grid), weights.dtype)
    num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
    mixed = fold_group(weights, num_kv_heads) @ call.value.to(call.layout.compute_dtype)  # (B, Hkv, G·L, Dv)
    output = unfold_group(mixed, num_heads).to(call.query.dtype)  # (B, H, L, Dv)
    return Results(output, lse if call.layout.lse else None, returned if call.layout.weights else None)


def reference_weights(call: Call) -> tuple[Tensor, Tensor]:
    """The weights p (B, H, L, S) and lse (B, H, L), in the compute dtype.

    A fully masked row has p = 0, lse = −∞ and zero gradients. With sinks its lse is the sink.
    """
    scores = reference_scores(call)
    keys = scores.shape[-1]
    sinks = call.finite_sinks
    if sinks is not None:  # a sink is one more key, whose value is zero
        sinks = of_rows(sinks).to(scores.dtype)[..., None]  # (1 or B, H, 1 or L, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)  # (B, H, L, S + 1)
        return scores.softmax(-1)[..., :keys], scores.logsumexp(-1)
    masked = call.coverage.masked_queries  # (1 or B, 1 or H, L, 1)
    if masked is None:
        return scores.softmax(-1), scores.logsumexp(-1)
    scores = scores.masked_fill(masked, 0)  # any finite number: the softmax of a row of −∞ is NaN
    weights = scores.softmax(-1).masked_fill(masked, 0)
    return weights, scores.logsumexp(-1).masked_fill(masked.squeeze(-1), float("-inf"))


def reference_scores(call: Call) -> Tensor:
    """The scores s (B, H, L, S), in the compute dtype, −∞ where they are masked."""
    num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
    query, key = call.query.to(call.layout.compute_dtype), call.key.to(call.layout.compute_dtype)
    folded = fold_group(query, num_kv_heads) @ key.transpose(-2, -1)  # (B, Hkv, G·L, S)
    scores = unfold_group(folded, num_heads) * call.layout.scale  # (B, H, L, S)
    if call.layout.softcap is not None:
        scores = call.layout.softcap * (scores / call.layout.softcap).tanh()
    if call.mask is None:
        return scores
    block = Block(call.grid)
    bias = call.mask.bias(block, scores.dtype)
    if bias is not None:
        scores = scores + bias
    visible = call.mask.visible(block)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))
