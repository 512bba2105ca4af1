"""Statistics that the native kernel computes for long calls on the CPU, as `statistics` would give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._call.spec import AttentionCall
from .._environment import is_tracing
from ..kernels._blocks import exact_dtype
from ..kernels._native_statistics import MOST_KEYS_OF_A_QUERY, WeightStatistics, gather, refuses
from .definitions import Options, TopK, mean_of_tiles

__all__ = ["native_results"]

#: Statistics, and the result of the kernel that each is read from.
_SOURCES = {
    "entropy": "entropy",
    "received": "received",
    "max_logit": "largest",
    "raw_max_logit": "raw",
    "confidence": "confidence",
    "top_k": "top",
    "output": "output",
    "output_norm": "norm",
    "map": "map",
    "head_average": "head_average",
}


def native_results(
    call: AttentionCall, names: Sequence[str], options: Options, counted: Tensor | None
) -> dict[str, Any]:
    """Those of the named statistics that the native kernel gives for this call, and ``sees``; empty if it gives none.

    It scores in float32, so calls whose scores are float64 are not for it; see `exact_dtype`.
    """
    top_k = min(options.top_k, call.grid.key_length)
    chosen = [name for name in names if name in _SOURCES and (name != "top_k" or top_k <= MOST_KEYS_OF_A_QUERY)]
    if not chosen or exact_dtype(call) != torch.float32 or is_tracing() or refuses(call):
        return {}
    found = gather(
        call,
        frozenset(_SOURCES[name] for name in chosen),
        counted,
        top_k=top_k,
        map_size=options.map_size,
        map_pooling=options.map_pooling,
    )
    results = {"sees": found.largest > float("-inf")}
    for name in chosen:
        results |= _named(name, found)
    return results


def _named(name: str, found: WeightStatistics) -> dict[str, Any]:
    """The results of one statistic, as its class in `statistics` names and defines them."""
    if name == "entropy":
        return {"entropy": found.entropy, "normalized_entropy": _normalized(found)}
    if name == "received" and found.received is not None and found.viewers is not None:
        return {"received": found.received, "received_mean": found.received / found.viewers.clamp(min=1)}
    if name == "max_logit":
        return {"max_logit": _largest_of_rows(found.largest, found.counted)}
    if name == "raw_max_logit" and found.raw is not None:
        return {"raw_max_logit": _largest_of_rows(found.raw, found.counted)}
    if name == "top_k" and found.top_keys is not None and found.top_weights is not None:
        return {"top_k": TopK(found.top_keys, found.top_weights)}
    if name == "map" and found.map is not None:
        length = found.largest.shape[-1]
        return {"map": found.map if found.map_max else mean_of_tiles(found.map, found.counted, length)}
    if name == "head_average" and found.weights is not None:
        return {"head_average": found.weights[:, 0]}
    return {name: {"confidence": found.confidence, "output": found.output, "output_norm": found.norm}[name]}


def _normalized(found: WeightStatistics) -> Tensor | None:
    if found.entropy is None:
        return None
    return (found.entropy / found.visible.clamp(min=2).log()).masked_fill_(found.visible < 2, 0)


def _largest_of_rows(largest: Tensor, counted: Tensor | None) -> Tensor:
    """(B, H) of the counted rows of (B, H, L)."""
    if counted is not None:
        largest = largest.masked_fill(~counted[:, None], float("-inf"))
    if largest.shape[-1] == 0:
        return largest.new_full(largest.shape[:2], float("-inf"))
    return largest.amax(-1)
