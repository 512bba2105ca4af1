"""Statistics of weights from the native kernel, which computes the scores of a tile once and stores none of them."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import AttentionCall
from ._native import arguments_of, empty_weights, weights_strides
from ._native_arguments import NativeArguments
from ._native_plan import plan_of
from ._native_support import native_refusals, reads_in_place, refuses_statistics

_PER_QUERY = {"entropy", "confidence", "distance", "raw", "norm", "sink"}


def refuses(call: AttentionCall) -> bool:
    """Whether the kernel cannot run the call, or computes no statistics of it."""
    spec, mask, grid = call.spec, call.request.mask, call.grid
    return bool(native_refusals(spec, mask, grid)) or refuses_statistics(spec, mask, grid)


def gather(call: AttentionCall, wanted: dict[str, Any], counted: Tensor | None, *, exact: bool) -> dict[str, Any]:
    """Compute statistics of one call in one pass.

    Args:
        call: the validated call.
        wanted: names, with their arguments: ``entropy``, ``confidence``, ``distance``, ``raw``, ``norm``, ``output``,
            ``received`` and ``head_average``; ``sink`` with the keys, bool (1 or B, 1 or H, S), and their number;
            ``top_k`` with the number of keys; ``map`` with its lines and columns, and whether a cell has its largest
            weight; ``offset`` with the offsets.
        counted: bool (B, L), the queries that ``received`` and ``map`` include, or ``None`` for all.
        exact: whether to score in double precision. For calls of few keys, whose scores fit the cache.

    Returns:
        The results by name, with ``largest`` and ``visible`` (B, H, L), with ``viewers`` beside ``received``, and with
        ``top_weights`` and ``top_keys`` in place of ``top_k``.
    """
    arguments = arguments_of(call)
    plan, (batch, heads, length, _), keys = plan_of(arguments), call.query.shape, call.key.shape[2]
    zeros = partial(call.query.new_zeros, dtype=torch.float32)
    results = {name: zeros((batch, heads, length)) for name in ("largest", "visible", *(_PER_QUERY & wanted.keys()))}
    options: dict[str, Any] = {"counted": None if counted is None else counted.contiguous(), "exact": exact}
    options["shift"] = call.grid.shift or 0
    if "sink" in wanted:
        marks, count = wanted["sink"]
        # A stable sort moves the numbers of the marked keys to the front, in order, without reading values.
        is_marked, numbers = marks.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
        first = numbers.masked_fill(is_marked == 0, -1)[..., :count].expand(batch, heads, count)
        options |= {"first_keys": first.int().contiguous(), "sink_keys": count}
    if "received" in wanted:
        results |= {name: zeros((batch, heads, keys)) for name in ("received", "viewers")}
    if "top_k" in wanted:
        options["top"] = wanted["top_k"]
        results["top_weights"] = zeros((batch, heads, length, wanted["top_k"]))
        results["top_keys"] = torch.full_like(results["top_weights"], -1, dtype=torch.int64)
    if "map" in wanted:
        (lines, columns), largest = wanted["map"]
        results["map"] = zeros((batch, heads, lines, columns))
        options |= {"map_rows": lines, "map_columns": columns, "map_max": largest}
    options |= results
    if "offset" in wanted:
        offsets = torch.tensor(wanted["offset"], dtype=torch.int64)
        results["offset"] = zeros((batch, heads, length, len(offsets)))
        options |= {"offsets": offsets, "offset_count": len(offsets), "stripes": results["offset"]}
    if "head_average" in wanted:
        results["head_average"] = average = zeros((batch, length, keys))
        options |= {"weights": average, "weights_strides": weights_strides(average)}
    if {"output", "norm"} & wanted.keys():
        return results | {"output": plan.forward(arguments, **options)}
    plan.statistics(arguments, **options)
    return results


def native_weights(
    call: AttentionCall, rows: Tensor | None, average: bool, *, head: int | None = None, exact: bool = False
) -> Tensor | None:
    """Weights of all rows, or of those numbered (n,): (B, H, n, S), or their mean over the heads (B, n, S), in float32.

    Args:
        call: the validated call.
        rows: numbers of rows, or ``None`` for all.
        average: whether to average over the heads.
        head: number of the only head, for (B, 1, n, S), or ``None`` for all.
        exact: as for `gather`.

    Returns:
        The weights, or ``None`` if the kernel does not compute them.
    """
    if refuses(call) or (rows is not None and not reads_in_place(call.request.mask, call.grid)):
        return None
    request = arguments_of(call)
    if head is not None:
        request = _of_head(request, head)
    if rows is not None:
        request = _of_rows(request, rows)
    weights = empty_weights(request, average=average)
    strides = weights_strides(weights)
    plan_of(request).statistics(request, weights=weights, weights_strides=strides, exact=exact)
    return weights


def _of_rows(request: NativeArguments, rows: Tensor) -> NativeArguments:
    """The request of some rows, whatever their order."""
    length, keys = request.query.shape[2], request.key.shape[2]

    def cut(tensor: Tensor | None, dim: int) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[dim] == 1 else tensor.index_select(dim, rows)

    # Chosen rows need not be neighbours, so a band becomes a range of columns per row.
    first, last = cut(request.first, 1), cut(request.last, 1)
    low, high = cast(int, request.low), cast(int, request.high)  # of a call that lowered its mask
    if low > -length or high < keys - 1:
        from_band, to_band = ((rows + step)[None].int() for step in (low, high + 1))
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
