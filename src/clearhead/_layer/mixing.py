"""Weights that are returned from inside the graph of the output: o = dropout(p) · v.

A loss that reads the output then has a gradient with respect to the returned weights, dp = do · vᵀ, and what hooks on
them change reaches query and key.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._call.call import Call, Results, zero_hidden
from .._call.dropout import draw_seed
from .._call.heads import fold_group, unfold_group
from .._call.packed import as_one_sequence, each_sequence
from .._torch_private import writes_to
from ..errors import KernelError, shape_text
from ..kernels._base import Kernel, Plan
from ..kernels._weights import compute_weights
from ..masks._grid import Block

#: `Call.weights` of such calls. A recomputation repeats the first kind and computes no weights for the second.
MIXED, MIXED_ONCE = "mixed", "mixed once"


def plan_mixed(run: Plan, forced: Kernel | None) -> Plan:
    """The plan of a call whose output is mixed by the returned weights. `run` computes the call without weights."""

    def mixed(call: Call) -> Results:
        layout = call.layout
        if layout.dropout_p > 0 and call.seed is None:
            call = call.alike(seed=draw_seed(call.query.device))
        output, lse, _ = run(call.rekeyed(weights=None))
        with _saved_apart() if layout.weights == MIXED_ONCE and not _is_traced(call) else nullcontext():
            zeroed = zero_hidden(as_one_sequence(call))
            weights = compute_weights(zeroed, None, False, forced).to(call.query.dtype)
            if not layout.gradients:
                return Results(output, lse, weights)
            product = _product(call, zeroed, weights)
        if _is_traced(call):
            return Results(product, lse, weights)
        return Results(cast(Tensor, _ValuesOf.apply(output.detach(), product)), lse, weights)

    return mixed


def _is_traced(call: Call) -> bool:
    return call.layout.tracing or call.layout.transformed


def _product(call: Call, zeroed: Call, weights: Tensor) -> Tensor:
    """dropout(p) · v by PyTorch's operations, (B, H, L, Dv)."""
    factors = _dropout_factors(call, weights)
    # NaN of a masked key reaches no gradient; other values there have the gradient of eager attention.
    value = call.value
    if zeroed.value is not value:
        value = torch.where(value.isfinite(), value, zeroed.value)
    folded = fold_group(weights if factors is None else weights * factors, value.shape[1])  # (B, Hkv, G·L, S)
    mixed = folded.to(call.layout.compute_dtype) @ value.to(call.layout.compute_dtype)
    return unfold_group(mixed, weights.shape[1]).to(call.query.dtype)  # (B, H, L, Dv)


def _dropout_factors(call: Call, weights: Tensor) -> Tensor | None:
    """The factors of all weights (B, H, L, S), or ``None`` without dropout."""
    if call.layout.dropout_p == 0:
        return None
    if call.sequences is None or not call.sequences.queries:
        whole = as_one_sequence(call)
        return whole.dropout_factors(Block(whole.grid), weights.dtype)
    factors = torch.zeros_like(weights)
    places = call.sequences.slices()
    for sequence, (queries, keys) in zip(each_sequence(call), places, strict=True):
        factors[:, :, queries, keys] = sequence.dropout_factors(Block(sequence.grid), weights.dtype)
    return factors


def _saved_apart() -> AbstractContextManager[Any]:
    """Keep what the block saves for a backward pass from checkpointing, which counts what it will compute again."""
    return saved_tensors_hooks(_saved, _unchanged)


def _saved(x: Tensor) -> tuple[Tensor, int | None]:
    return x.detach(), writes_to(x)


def _unchanged(saved: tuple[Tensor, int | None]) -> Tensor:
    """What was saved. Autograd does not look for writes to what hooks keep, so they are looked for here."""
    x, writes = saved
    if writes_to(x) != writes:
        raise KernelError(
            "returned weights, or the query, key or value",
            expected="the values of the forward pass, which the backward pass reads",
            got=f"a tensor {shape_text(x.shape)} that was modified by an inplace operation",
            fix="Write to a copy, such as weights.clone().",
        )
    return x.detach()


class _ValuesOf(torch.autograd.Function):
    """The values of one tensor with the graph of another, which has the same up to rounding."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, graph: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]
