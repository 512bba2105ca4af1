"""Statistics of weights, and weights, on a GPU from the Triton kernels. Importing this module imports Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._call.call import Call
from ._second_order import sinks_gradient
from ._triton import Operands, _calls, operands_of


def statistics(call: Call, wanted: dict[str, Any], counted: Tensor | None) -> dict[str, Any]:
    """Compute statistics of one call, in one pass over query and key for each kernel.

    Args:
        call: the validated call.
        wanted, counted: as for `_native_statistics.statistics`, without ``raw``, ``norm``, ``output`` and ``stripes``.
            ``first_keys`` are bool (1 or B, 1 or H, S).

    Returns:
        The buffers by the same names, and ``largest``, the largest score of each query.
    """
    operands, names = operands_of(call), {"max_logit", *wanted}  # `rows` ignores those of other kernels
    if {"received", "top", "map", "weights"} & wanted.keys():
        names.add("lse")
    top, first_keys = wanted.get("top", 0), wanted.get("first_keys")
    buffers: dict[str, Any] = _calls.rows(operands, sinks=call.finite_sinks, first_keys=first_keys, want=names, top=top)
    buffers["largest"] = buffers.pop("max_logit")
    if "received" in wanted:
        buffers["received"], buffers["viewers"] = _calls.columns(operands, buffers["lse"], counted)
    if "map" in wanted:
        cells, largest = wanted["map"][2:], wanted["map_max"]
        buffers["map"] = _calls.pooled(operands, buffers["lse"], cells, counted=counted, largest=largest)
    if "weights" in wanted:
        buffers["weights"] = _calls.weights(operands, buffers["lse"], average=True)
    return buffers


def weights(call: Call, chosen: Tensor | None, average: bool, head: int | None = None) -> Tensor:
    """Weights without gradients.

    Args:
        call: the validated call.
        chosen: row numbers on the device, or ``None`` for all.
        average: whether to average over the heads.
        head: number of the only head, or ``None`` for all.

    Returns:
        (B, H, n, S), or (B, n, S) if averaged, or of one head.
    """
    operands, sinks = _chosen(call, chosen), call.finite_sinks
    if head is not None:
        operands, sinks = operands.of_head(head), None if sinks is None else sinks.narrow(0, head, 1)
    lse = _calls.rows(operands, sinks=sinks)["lse"]
    return _calls.weights(operands, lse, average=average or head is not None)


def weights_gradients(call: Call, chosen: Tensor | None, average: bool, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of `weights_inputs` from that of the weights, with ``None`` for each bias.

    Args:
        call, chosen, average: as for `weights`.
        gradient: (B, H, n, S), or (B, n, S) if averaged.
    """
    operands, sinks = _chosen(call, chosen), call.finite_sinks
    lse = _calls.rows(operands, sinks=sinks)["lse"]
    of_weights = gradient[:, None] if average else gradient
    of_query, of_key, means = _calls.weights_gradients(operands, lse, of_weights)
    if chosen is not None:  # a row may be chosen more than once: its gradients add up
        of_query = torch.zeros_like(call.query, dtype=of_query.dtype).index_add_(2, chosen, of_query)
    of_inputs = [of_query.to(call.query.dtype), of_key.to(call.key.dtype)]
    if sinks is not None:
        of_inputs.append(sinks_gradient(sinks, means, lse.masked_fill(lse == float("-inf"), float("inf"))))
    return *of_inputs, *(None for _ in call.bias_tensors)


def _chosen(call: Call, chosen: Tensor | None) -> Operands:
    """The operands of the chosen rows."""
    operands = operands_of(call)
    return operands if chosen is None else operands.of_rows(chosen)
