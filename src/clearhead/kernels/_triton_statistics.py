"""Statistics of weights, and weights, on a GPU from the Triton kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._call.call import AttentionCall
from ._triton import available, columns, pooled, rows, terms_of
from ._triton import weights as weights_by_kernel
from ._triton_check import CHECK

#: Results of `rows` that a statistic can ask for.
_OF_ROWS = ("entropy", "visible", "confidence", "sink", "distance")


def runs(call: AttentionCall) -> bool:
    """Whether the kernels compute statistics of the call. The first time on a device, they are checked there."""
    if call.spec.tracing or call.spec.transformed or not available(call.query):
        return False
    return 0 not in (*call.query.shape, *call.key.shape) and CHECK.passes(call.query.device, call.query.dtype)


def gather(call: AttentionCall, wanted: dict[str, Any], counted: Tensor | None) -> dict[str, Any]:
    """Compute statistics of one call, in one pass over query and key for each kernel.

    Args:
        call: the validated call.
        wanted: names, with their arguments: ``entropy``, ``visible``, ``confidence`` and ``distance``; ``sink`` with
            the keys, bool (1 or B, 1 or H, S); ``received``; ``top_k`` with the number of keys; ``head_average``;
            ``map`` with its lines and columns, and whether a cell has its largest weight.
        counted: bool (B, L), the queries that ``received`` and ``map`` include, or ``None`` for all.

    Returns:
        The results under the names of the native buffers (``_native/problem.h``), with ``largest`` (B, H, L).
    """
    operands, terms = (call.query, call.key), terms_of(call)
    options: dict[str, Any] = {"scale": call.spec.scale, "softcap": call.spec.softcap}
    names = {"max_logit", *(name for name in _OF_ROWS if name in wanted)}
    if {"received", "top_k", "map", "head_average"} & wanted.keys():
        names.add("lse")
    buffers: dict[str, Any] = rows(
        *operands, terms, **options, sinks=call.request.sinks, first_keys=wanted.get("sink"), want=tuple(names),
        top=wanted.get("top_k", 0),
    )  # fmt: skip
    buffers["largest"] = buffers.pop("max_logit")
    if "received" in wanted:
        received = columns(*operands, buffers["lse"], terms, **options, counted=counted)
        buffers["received"], buffers["viewers"] = received
    if "map" in wanted:
        cells, largest = wanted["map"]
        buffers["map"] = pooled(*operands, buffers["lse"], terms, cells, **options, counted=counted, largest=largest)
    if "head_average" in wanted:
        buffers["head_average"] = weights_by_kernel(*operands, buffers["lse"], terms, **options, average=True)
    return buffers


def weights(call: AttentionCall, chosen: Tensor | None, average: bool, head: int | None = None) -> Tensor:
    """Weights without gradients.

    Args:
        call: the validated call.
        chosen: row numbers on the device, or ``None`` for all.
        average: whether to average over the heads.
        head: number of the only head, or ``None`` for all.

    Returns:
        (B, H, n, S), or (B, n, S) if averaged, or of one head.
    """
    query, key, terms, sinks = call.query, call.key, terms_of(call), call.request.sinks
    options: dict[str, Any] = {"scale": call.spec.scale, "softcap": call.spec.softcap}
    if chosen is not None:
        query, terms = query.index_select(2, chosen), terms.of_rows(chosen, query.shape[2], key.shape[2])
    if head is not None:
        query, key = query.narrow(1, head, 1), key.narrow(1, head // call.spec.group, 1)
        terms, sinks = terms.of_head(head), None if sinks is None else sinks.narrow(0, head, 1)
    lse = rows(query, key, terms, **options, sinks=sinks)["lse"]
    return weights_by_kernel(query, key, lse, terms, **options, average=average or head is not None)
