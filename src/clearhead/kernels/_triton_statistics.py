"""Statistics of weights, and weights, on a GPU from the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._call.call import AttentionCall
from ._second_order import sinks_gradient
from ._triton import Terms, available, columns, pooled, rows, terms_of
from ._triton import weights as weights_by_kernel
from ._triton import weights_gradients as gradients_by_kernel
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
    query, terms = _chosen(call, chosen)
    key, sinks = call.key, call.request.sinks
    options: dict[str, Any] = {"scale": call.spec.scale, "softcap": call.spec.softcap}
    if head is not None:
        query, key = query.narrow(1, head, 1), key.narrow(1, head // call.spec.group, 1)
        terms, sinks = terms.of_head(head), None if sinks is None else sinks.narrow(0, head, 1)
    lse = rows(query, key, terms, **options, sinks=sinks)["lse"]
    return weights_by_kernel(query, key, lse, terms, **options, average=average or head is not None)


def weights_gradients(
    call: AttentionCall, chosen: Tensor | None, average: bool, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of `weights_inputs` from that of the weights, with ``None`` for each bias.

    Args:
        call, chosen, average: as for `weights`.
        gradient: (B, H, n, S), or (B, n, S) if averaged.
    """
    query, terms = _chosen(call, chosen)
    key, sinks = call.key, call.request.sinks
    options: dict[str, Any] = {"scale": call.spec.scale, "softcap": call.spec.softcap}
    lse = rows(query, key, terms, **options, sinks=sinks)["lse"]
    of_weights = gradient[:, None] if average else gradient
    of_query, of_key, means = gradients_by_kernel(query, key, lse, of_weights, terms, **options)
    if chosen is not None:  # a row may be chosen more than once: its gradients add up
        of_query = torch.zeros_like(call.query, dtype=of_query.dtype).index_add_(2, chosen, of_query)
    of_inputs = [of_query.to(query.dtype), of_key.to(key.dtype)]
    if sinks is not None:
        of_inputs.append(sinks_gradient(sinks, means, lse.masked_fill(lse == float("-inf"), float("inf"))))
    return *of_inputs, *(None for _ in call.bias_tensors)


def _chosen(call: AttentionCall, chosen: Tensor | None) -> tuple[Tensor, Terms]:
    """The query of chosen rows, and the mask of these."""
    query, terms = call.query, terms_of(call)
    if chosen is None:
        return query, terms
    return query.index_select(2, chosen), terms.of_rows(chosen, query.shape[2], call.key.shape[2])
