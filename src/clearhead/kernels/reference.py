"""The textbook formula: any call, any dtype, differentiable twice. Every other kernel is judged by it."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from ..call import AttentionCall
from ..dropout import dropout_factors
from ..heads import fold_group, unfold_group
from ..masks.grid import Block
from .base import Kernel, Refusal

__all__ = ["ReferenceKernel", "reference_weights"]


@final
class ReferenceKernel(Kernel):
    """softmax(scale · q kᵀ + bias) v, with the whole (B, H, L, S) tensor in memory."""

    name: ClassVar[str] = "reference"
    twice_differentiable: ClassVar[bool] = True

    def refusals(self, call: AttentionCall) -> tuple[Refusal, ...]:
        return ()

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        weights, lse = reference_weights(call)  # (B, H, L, S), (B, H, L)
        if call.dropout_seed is not None:
            block = Block(call.grid)
            weights = weights * dropout_factors(call.dropout_seed, call.dropout_p, block, weights.dtype)
        num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
        mixed = fold_group(weights, num_kv_heads) @ call.value.to(call.compute_dtype)  # (B, Hkv, G·L, Dv)
        output = unfold_group(mixed, num_heads).to(call.query.dtype)  # (B, H, L, Dv)
        return output, lse if call.return_lse else None


def reference_weights(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The weights p (B, H, L, S) and lse (B, H, L), in the compute dtype.

    A query that sees no key gets p = 0 and lse = −∞ (its sink, if there are sinks), with zero gradients.
    """
    scores = _scores(call)
    peak = _peak(scores, call.sinks)  # (B, H, L, 1)
    terms = (scores - peak).exp()  # (B, H, L, S)
    total = terms.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + (_column(call.sinks, scores.dtype) - peak).exp()
    empty = total == 0
    divisor = total.masked_fill(empty, 1)
    lse = (peak + divisor.log()).masked_fill(empty, float("-inf"))
    return terms / divisor, lse.squeeze(-1)


def _scores(call: AttentionCall) -> Tensor:
    num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
    query, key = call.query.to(call.compute_dtype), call.key.to(call.compute_dtype)
    folded = fold_group(query, num_kv_heads) @ key.transpose(-2, -1)  # (B, Hkv, G·L, S)
    scores = unfold_group(folded, num_heads) * call.scale  # (B, H, L, S)
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if call.mask is None:
        return scores
    block = Block(call.grid)
    bias = call.mask.bias(block)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    visible = call.mask.visible(block)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def _peak(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """A constant per row that keeps exp in range; its choice does not change the result."""
    if scores.shape[-1] == 0:
        peak = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    else:
        peak = scores.detach().amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, _column(sinks.detach(), scores.dtype))
    return peak.masked_fill(peak == float("-inf"), 0)


def _column(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    return sinks.to(dtype)[None, :, None, None]  # (1, H, 1, 1)
