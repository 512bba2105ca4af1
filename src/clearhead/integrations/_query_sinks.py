"""Sinks that each query has of its own: logits with a value of zero, beside those of the keys.

Such a sink takes the share σ(sink − lse) of the weights, lse without it. So the output is that without sinks times
σ(lse − sink), and no kernel needs another operand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._environment import Environment
from ..errors import ArgumentError, ShapeError, shape_text


def require_sinks(sinks: Tensor, query: Tensor, environment: Environment) -> None:
    """Check sinks (B or 1, H, L, 1) of a query (B, H, L, D)."""
    batch, heads, length, _ = query.shape
    if sinks.dim() != 4 or sinks.shape[1:] != (heads, length, 1) or sinks.shape[0] not in (1, batch):
        expected = f"(B or 1, H, L, 1) with B = {batch}, H = {heads}, L = {length}"
        raise ShapeError("sinks", expected=expected, got=shape_text(sinks.shape))
    if environment.observed:
        fix = 'Use model.set_attn_implementation("eager") for what is recorded.'
        expected = "no sinks of single queries in a call that is recorded or changed, whose weights would lack them"
        raise ArgumentError("sinks", expected=expected, got=f"a Tensor {shape_text(sinks.shape)}", fix=fix)


def with_sinks(output: Tensor, weights: Tensor | None, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output (B, H, L, Dv) and weights (B, H, L, S) with the sinks in their denominator."""
    left = torch.sigmoid(lse.unsqueeze(-1) - sinks)  # (B, H, L, 1)
    return output * left.to(output.dtype), None if weights is None else weights * left.to(weights.dtype)
