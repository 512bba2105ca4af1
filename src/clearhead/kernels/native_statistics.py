"""Statistics of weights from the native kernel, which computes the scores of a tile once and stores none of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..call import AttentionCall
from ..masks.band import band_of
from .native import NativeKernel, request_of
from .native_calls import empty_output, statistics

__all__ = ["MOST_KEYS_OF_A_QUERY", "WeightStatistics", "gather", "refuses"]

MOST_KEYS_OF_A_QUERY = 64  # in top-k: longer lists are no longer short beside the scores
_MOST_CELLS = 1 << 26  # of a mask that has to be written down first


@dataclass
class WeightStatistics:
    """What is wanted of one call, as tensors that are written; ``None`` is not.

    Args:
        counted: bool (B, L), contiguous: the queries that sums over queries take in. ``None``: all.
        largest: (B, H, L), the largest score, −∞ where nothing is seen.
        visible: (B, H, L), how many keys are seen.
        entropy: (B, H, L), in nats.
        confidence: (B, H, L), the largest weight.
        norm: (B, H, L), lengths of the outputs; needs `output`.
        received: (B, H, S), sums over counted queries.
        viewers: (B, H, S), how many counted queries see each key; with `received`.
        top_weights: (B, H, L, k), falling.
        top_keys: int64 (B, H, L, k), −1 where fewer are seen.
        output: (B, H, L, Dv), what `attention` gives.
    """

    counted: Tensor | None
    largest: Tensor
    visible: Tensor
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    norm: Tensor | None = None
    received: Tensor | None = None
    viewers: Tensor | None = None
    top_weights: Tensor | None = None
    top_keys: Tensor | None = None
    output: Tensor | None = field(default=None)


def refuses(call: AttentionCall) -> bool:
    """Whether the kernel cannot run the call, or its mask would first have to be written down and is large."""
    if NativeKernel().refusals(call):
        return True
    grid = call.grid
    if grid.batch_size * grid.query_length * grid.key_length <= _MOST_CELLS or call.mask is None:
        return False
    parts = call.mask.parts()
    return not all(part.is_tensor or band_of(part, grid) or part.row_spans(grid) for part in parts)


def gather(call: AttentionCall, wanted: frozenset[str], counted: Tensor | None, top_k: int) -> WeightStatistics:
    """Compute the fields that are named; `largest` and `visible` always are."""
    batch, heads, length, keys = *call.query.shape[:3], call.grid.key_length

    def empty(*shape: int) -> Tensor:
        return call.query.new_empty(batch, heads, *shape, dtype=torch.float32)

    found = WeightStatistics(None if counted is None else counted.contiguous(), empty(length), empty(length))
    for name in wanted & {"entropy", "confidence", "norm"}:
        setattr(found, name, empty(length))
    if "received" in wanted:
        found.received, found.viewers = empty(keys).zero_(), empty(keys).zero_()
    if "top" in wanted:
        found.top_weights = empty(length, top_k)
        found.top_keys = found.top_weights.new_empty(found.top_weights.shape, dtype=torch.int64)
    if wanted & {"output", "norm"}:
        found.output = empty_output(call.query, call.value)
    statistics(request_of(call), found)
    return found
