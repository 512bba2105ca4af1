"""Statistics that the native kernel computes on the CPU, as `definitions` would give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import AttentionCall
from .._environment import is_tracing
from ..kernels._blocks import exact_dtype
from ..kernels._native_statistics import MOST_KEYS_OF_A_QUERY, WeightStatistics, gather, refuses
from .definitions import STATISTICS, Options, TopK, entropy_results, mean_of_tiles, sink_marks

_MOST_SINK_KEYS = 64

#: What `gather` calls the results of the kernel that a statistic is read from, where it is not the statistic's name.
_SOURCES = {
    "max_logit": "largest",
    "raw_max_logit": "raw",
    "top_k": "top",
    "output_norm": "norm",
    "offset": "stripes",
}


def native_results(
    call: AttentionCall, names: Sequence[str], options: Options, counted: Tensor | None
) -> dict[str, Any]:
    """Those of the named statistics that the native kernel gives for this call, and ``sees``; empty if it gives none.

    Float64 inputs are not for it. Calls of few keys are scored in double precision all the same; see `exact_dtype`.
    """
    top_k = min(options.top_k, call.grid.key_length)
    # What is left out here is computed by blocks, and the results are put together.
    chosen = [name for name in names if name in STATISTICS and _is_given(name, call, options)]
    if not chosen or call.spec.compute_dtype != torch.float32 or is_tracing() or refuses(call):
        return {}
    found = gather(
        call,
        frozenset(_SOURCES.get(name, name) for name in chosen),
        counted,
        top_k=top_k,
        map_size=options.map_size,
        map_pooling=options.map_pooling,
        first_keys=_first_keys(call, options) if "sink" in chosen else None,
        offsets=options.offsets,
        exact=exact_dtype(call) == torch.float64,
    )
    results = {"sees": found.largest > float("-inf")}
    for name in chosen:
        results |= _named(name, found)
    return results


def _is_given(name: str, call: AttentionCall, options: Options) -> bool:
    if name == "top_k":
        return min(options.top_k, call.grid.key_length) <= MOST_KEYS_OF_A_QUERY
    if name == "sink":
        return options.sink_keys <= _MOST_SINK_KEYS
    return name not in ("distance", "offset") or call.grid.shift is not None


def _first_keys(call: AttentionCall, options: Options) -> Tensor:
    """The first keys that any query of the item sees, (B, H, `sink_keys`); −1 where there are fewer."""
    marks = sink_marks(call, options.sink_keys).squeeze(-1)  # (1 or B, 1 or H, S)
    count = min(options.sink_keys, call.grid.key_length)
    # A stable sort of the marks puts the numbers of the marked keys first, in order, without reading any.
    there, places = marks.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
    first = places.masked_fill(there == 0, -1)[..., :count]  # (1 or B, 1 or H, count)
    return first.expand(call.grid.batch_size, call.grid.num_heads, count)


def _named(name: str, found: WeightStatistics) -> dict[str, Any]:
    """The results of one statistic, as its class in `definitions` names and defines them."""
    source: Any = getattr(found, _SOURCES.get(name, name), None)
    match name:
        case "entropy":
            return entropy_results(source, found.visible)
        case "received":
            viewers = cast(Tensor, found.viewers)
            return {"received": source, "received_mean": source / viewers.clamp(min=1)}
        case "top_k":
            source = TopK(cast(Tensor, found.top_keys), cast(Tensor, found.top_weights))
        case "max_logit" | "raw_max_logit":
            source = _largest_of_rows(source, found.counted)
        case "map" if not found.map_max:
            source = mean_of_tiles(source, found.counted, found.largest.shape[-1])
        case "head_average":
            source = cast(Tensor, found.weights)
        case "offset":
            source = _mean_of_stripes(source, found.counted)
        case _:
            pass
    return {name: source}


def _mean_of_stripes(stripes: Tensor, counted: Tensor | None) -> Tensor:
    """Means over the counted queries that see the key at each offset, (B, H, offsets)."""
    there = stripes >= 0
    if counted is not None:
        there &= counted[:, None, :, None]
    # One running sum over a long sequence would lose digits in float32.
    sums = (stripes * there).sum(2, dtype=torch.float64)
    return (sums / there.sum(2).clamp(min=1)).float()


def _largest_of_rows(largest: Tensor, counted: Tensor | None) -> Tensor:
    """(B, H) of the counted rows of (B, H, L)."""
    if counted is not None:
        largest = largest.masked_fill(~counted[:, None], float("-inf"))
    # `amax` refuses to reduce nothing.
    if largest.shape[-1] == 0:
        return largest.new_full(largest.shape[:2], float("-inf"))
    return largest.amax(-1)
