"""Statistics of weights from the native kernel, which computes the scores of a tile once and stores none of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._call.call import Call
from .._environment import is_tracing
from ._base import Refusal, cut, rows_of_mask
from ._blocks import exact_dtype
from ._native import arguments_of, empty_weights, weights_strides
from ._native_arguments import NativeArguments
from ._native_plan import plan_of
from ._native_support import native_refusals, reads_in_place, refusals_of_statistics


def refusals(call: Call) -> tuple[Refusal, ...]:
    """The reasons against weights and statistics of the call: those against the call itself first."""
    if is_tracing():
        return (Refusal("a graph has weights and statistics from PyTorch's own operators only"),)
    arguments = call.layout, call.bound
    return native_refusals(*arguments) or refusals_of_statistics(*arguments)


def statistics(call: Call, wanted: dict[str, Any], counted: Tensor | None) -> dict[str, Any]:
    """Compute statistics of one call in one pass.

    Args:
        call: the validated call.
        wanted: arguments of the kernel, by the names of `Statistics` in ``_native/problem.h``. A tuple is the shape of
            a buffer that it writes. ``output`` asks for the output of the call. ``exact`` (default ``True``) scores few
            keys in double precision.
        counted: bool (B, L), the queries that ``received`` and ``map`` include, or ``None`` for all.

    Returns:
        All arguments by name, with ``largest`` (B, H, L), the largest score of each query.
    """
    arguments, row_shape = arguments_of(call), tuple(call.query.shape[:3])
    options: dict[str, Any] = {"largest": row_shape, **wanted}
    plan, with_output = plan_of(arguments), options.pop("output", False)
    for name, shape in options.items():
        if isinstance(shape, tuple):
            dtype = torch.int64 if name == "top_keys" else torch.float32
            options[name] = call.query.new_zeros(shape, dtype=dtype)
    if "weights" in options:
        options["weights_strides"] = weights_strides(options["weights"])
    options["exact"] = options.get("exact", True) and exact_dtype(call) == torch.float64
    options["shift"] = call.grid.shift or 0
    options["counted"] = None if counted is None else counted.contiguous()
    if with_output:
        options["output"] = plan.forward(arguments, **options)
    else:
        plan.statistics(arguments, **options)
    return options


def native_weights(
    call: Call, rows: Tensor | None, average: bool, *, head: int | None = None, exact: bool = False
) -> Tensor | None:
    """Weights of all rows, or of those numbered (n,): (B, H, n, S), or their mean over the heads (B, n, S), in float32.

    Args:
        call: the validated call.
        rows: numbers of rows, or ``None`` for all.
        average: whether to average over the heads.
        head: number of the only head, for (B, 1, n, S), or ``None`` for all.
        exact: whether to score in double precision. For calls of few keys, whose scores fit the cache.

    Returns:
        The weights, or ``None`` if the kernel does not compute them.
    """
    if refusals(call) or (rows is not None and not reads_in_place(call.bound)):
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


def _of_rows(arguments: NativeArguments, rows: Tensor) -> NativeArguments:
    """The arguments of some rows, whatever their order."""
    query, count = arguments.query, arguments.key.shape[2]
    of_mask = rows_of_mask(arguments, rows, (query.shape[2], count))
    ranges = {name: of_mask[name].contiguous() for name in ("first", "last") if name in of_mask}
    if arguments.sinks is not None and arguments.sinks.dim() > 1:
        ranges["sinks"] = arguments.sinks.index_select(2, rows)
    selected = None if arguments.selected is None else arguments.selected.index_select(2, rows)
    return arguments._replace(query=query.index_select(2, rows), selected=selected, **{**of_mask, **ranges})


def _of_head(arguments: NativeArguments, head: int) -> NativeArguments:
    """The arguments of one query head."""
    kv_head = head * arguments.key.shape[1] // arguments.query.shape[1]
    per_row = arguments.sinks is not None and arguments.sinks.dim() > 1
    of_query = cut(arguments, {"query": 1, "sinks": int(per_row), "visible": 1, "bias": 1}, slice(head, head + 1))
    if per_row:
        of_query["sinks"] = of_query["sinks"].contiguous()
    of_key = cut(arguments, {"key": 1, "value": 1}, slice(kv_head, kv_head + 1))
    if (selected := arguments.selected) is not None:
        listing = head * selected.shape[1] // arguments.query.shape[1]
        of_key["selected"] = selected[:, listing : listing + 1]
    return arguments._replace(**of_query, **of_key)
