"""Statistics of weights from the native kernel, which computes the scores of a tile once and stores none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._call.call import AttentionCall
from ._native import arguments_of, empty_weights, weights_strides
from ._native_plan import NativeArguments
from ._native_support import native_refusals, reads_in_place, refuses_statistics

MOST_KEYS_OF_A_QUERY = 64  # in top-k: longer lists are no longer short beside the scores


@dataclass
class WeightStatistics:
    """What is wanted of one call, as tensors that are written; ``None`` is not.

    Args:
        counted: bool (B, L), contiguous: the queries that sums over queries take in. ``None``: all.
        largest: (B, H, L), the largest score, −∞ where nothing is seen.
        visible: (B, H, L), how many keys are seen.
        raw: (B, H, L), the largest scale · q·k of the keys that are seen, before soft-cap and bias; else −∞.
        entropy: (B, H, L), in nats.
        confidence: (B, H, L), the largest weight.
        norm: (B, H, L), lengths of the outputs; needs `output`.
        received: (B, H, S), sums over counted queries.
        viewers: (B, H, S), how many counted queries see each key; with `received`.
        top_weights: (B, H, L, k), falling.
        top_keys: int64 (B, H, L, k), −1 where fewer are seen.
        output: (B, H, L, Dv), what `attention` gives.
        weights: (B, H, L, S), or (B, L, S) for their mean over the heads.
        map: (B, H, R, C), what tile ⌊i·R/L⌋, ⌊j·C/S⌋ gets of counted queries: the sum, or the largest weight.
        map_max: which of the two.
        first_keys: int32 (B, H, t), keys whose weights are added up in `sink`; −1 is none.
        sink: (B, H, L).
        distance: (B, H, L), Σ p |i + shift − j|.
        offsets: int64 (O,).
        stripes: (B, H, L, O), the weight of key i + shift + offset, −1 where the row sees no such key.
        shift: how far the first query stands after the first key.
        exact: scores in double precision.
    """

    counted: Tensor | None
    largest: Tensor
    visible: Tensor
    raw: Tensor | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    norm: Tensor | None = None
    received: Tensor | None = None
    viewers: Tensor | None = None
    top_weights: Tensor | None = None
    top_keys: Tensor | None = None
    output: Tensor | None = None
    weights: Tensor | None = None
    map: Tensor | None = None
    map_max: bool = False
    first_keys: Tensor | None = None
    sink: Tensor | None = None
    distance: Tensor | None = None
    offsets: Tensor | None = None
    stripes: Tensor | None = None
    shift: int = 0
    exact: bool = False


def refuses(call: AttentionCall) -> bool:
    """Whether the kernel cannot run the call, or gives no statistics of it."""
    spec, mask, grid = call.spec, call.mask, call.grid
    return bool(native_refusals(spec, mask, grid)) or refuses_statistics(spec, mask, grid)


def gather(
    call: AttentionCall,
    wanted: frozenset[str],
    counted: Tensor | None,
    *,
    top_k: int = 0,
    map_size: int = 0,
    map_pooling: Literal["mass", "max"] = "mass",
    first_keys: Tensor | None = None,
    offsets: tuple[int, ...] = (),
    exact: bool = False,
) -> WeightStatistics:
    """Compute the fields that are named; `largest` and `visible` always are.

    Args:
        call: which attention.
        wanted: names of fields, ``top`` for the two of them, ``head_average`` for the mean of ``weights``.
        counted: bool (B, L), or ``None`` for all.
        top_k: how many keys of each query.
        map_size: R and C at most.
        map_pooling: sums, or the largest weight.
        first_keys: int (B, H, t), for ``sink``.
        offsets: for ``stripes``, which needs positions that count up, as ``distance`` does.
        exact: whether scores are computed in double precision, for calls of few keys: the scores of some rows are
            kept in the cache.
    """
    request = arguments_of(call)
    (batch, heads, length, _), keys = request.query.shape, request.key.shape[2]

    def empty(*shape: int) -> Tensor:
        return request.query.new_empty(batch, heads, *shape, dtype=torch.float32)

    found = WeightStatistics(None if counted is None else counted.contiguous(), empty(length), empty(length))
    found.map_max, found.exact, found.shift = map_pooling == "max", exact, call.grid.shift or 0
    for name in wanted & {"raw", "entropy", "confidence", "norm", "distance"}:
        setattr(found, name, empty(length))
    if "received" in wanted:
        found.received, found.viewers = empty(keys).zero_(), empty(keys).zero_()  # tasks add to them
    if "top" in wanted:
        found.top_weights = empty(length, top_k)
        found.top_keys = found.top_weights.new_empty(found.top_weights.shape, dtype=torch.int64)
    if wanted & {"output", "norm"}:
        found.output = request.plan().empty_output(request.query)
    if wanted & {"weights", "head_average"}:
        found.weights = empty_weights(request, average="weights" not in wanted)
    if "map" in wanted:
        found.map = empty(min(map_size, length), min(map_size, keys)).zero_()
    if "sink" in wanted and first_keys is not None:
        found.first_keys, found.sink = first_keys.int().contiguous(), empty(length)
    if "stripes" in wanted:
        found.offsets, found.stripes = torch.tensor(offsets, dtype=torch.int64), empty(length, len(offsets))
    request.plan().statistics(*request.inputs, request.extras, found.output, None, **_wanted(found))
    return found


def native_weights(
    call: AttentionCall, rows: Tensor | None, average: bool, *, head: int | None = None, exact: bool = False
) -> Tensor | None:
    """Weights of all rows, or of those numbered (n,): (B, H, n, S), or their mean over the heads (B, n, S), in float32.

    Args:
        call: which attention.
        rows: numbers of rows, or ``None`` for all.
        average: whether the mean over the heads is wanted.
        head: the only one that is wanted, (B, 1, n, S). Default: all.
        exact: as for `gather`.

    Returns:
        ``None`` where the kernel gives none.
    """
    if refuses(call) or (rows is not None and not reads_in_place(call.mask, call.grid)):
        return None
    request = arguments_of(call) if rows is None else _of_rows(arguments_of(call), rows)
    if head is not None:
        request = _of_head(request, head)
    weights = empty_weights(request, average=average)
    strides = weights_strides(weights)
    request.plan().statistics(*request.inputs, request.extras, weights=weights, weights_strides=strides, exact=exact)
    return weights


def _wanted(found: WeightStatistics) -> dict[str, Tensor | int | tuple[int, ...] | None]:
    """By the names of ``Statistics`` in ``_native/problem.h``."""
    names = ("counted", "largest", "visible", "raw", "entropy", "confidence", "norm", "received", "viewers")
    names += ("top_weights", "top_keys", "weights", "map", "first_keys", "sink", "distance", "offsets", "stripes")
    wanted = {name: getattr(found, name) for name in (*names, "shift", "exact")}
    if found.top_weights is not None:
        wanted["top"] = found.top_weights.shape[-1]
    if found.weights is not None:
        wanted["weights_strides"] = weights_strides(found.weights)
    if found.map is not None:
        wanted |= {"map_rows": found.map.shape[2], "map_columns": found.map.shape[3], "map_max": found.map_max}
    if found.first_keys is not None:
        wanted["sink_keys"] = found.first_keys.shape[-1]
    if found.offsets is not None:
        wanted["offset_count"] = len(found.offsets)
    return wanted


def _of_rows(request: NativeArguments, rows: Tensor) -> NativeArguments:
    """The request of some rows, whatever their order."""
    length, keys = request.query.shape[2], request.key.shape[2]

    def cut(tensor: Tensor | None, dim: int) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[dim] == 1 else tensor.index_select(dim, rows)

    # Chosen rows need not be neighbours, so that a band becomes one range of columns for each.
    first, last = cut(request.first, 1), cut(request.last, 1)
    if request.low > -length or request.high < keys - 1:
        from_band, to_band = ((rows + step)[None].int() for step in (request.low, request.high + 1))
        first = from_band if first is None else torch.maximum(first, from_band)
        last = to_band if last is None else torch.minimum(last, to_band)
    return request._replace(
        query=request.query.index_select(2, rows),
        visible=cut(request.visible, 2),
        bias=cut(request.bias, 2),
        first=None if first is None else first.clamp(min=0),
        last=last,
        low=-len(rows),
        high=keys,
    )


def _of_head(request: NativeArguments, head: int) -> NativeArguments:
    """The request of one query head."""
    group = request.query.shape[1] // request.key.shape[1]

    def cut(tensor: Tensor | None, dim: int = 1) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[dim] == 1 else tensor.narrow(dim, head, 1)

    key, value = (tensor.narrow(1, head // group, 1) for tensor in (request.key, request.value))
    return request._replace(
        query=request.query.narrow(1, head, 1),
        key=key,
        value=value,
        sinks=cut(request.sinks, 0),
        visible=cut(request.visible),
        bias=cut(request.bias),
    )
