"""The Triton kernels are compared with `reference` once on each device, before their results are used."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from .. import masks
from .._call.call import Call, valid_call
from .._environment import autocast_off
from ._base import Refusal, refusals_of_formula
from ._first_check import FirstCheck
from ._reference import reference_scores, reference_weights
from ._triton import available, operands_of
from ._triton._available import DTYPES, LARGEST_DIM

#: The largest error of a result, relative to numbers above 1. Both sides read the same rounded query and key.
TOLERANCE = 1e-3
_TOP = 8
_CELLS = (3, 2)


def triton_refusals(call: Call) -> tuple[Refusal, ...]:
    """The reason against weights and statistics of the call. The first time on a device, the kernels are checked."""
    layout, query = call.layout, call.query
    if layout.tracing or layout.transformed or layout.dispatching or layout.subclass is not None:
        return (Refusal("graphs, transforms, dispatch modes and subclasses of tensors need PyTorch's own operators"),)
    if "row_sinks" in layout.formula:
        return tuple(refusals_of_formula(layout, frozenset({"softcap", "sinks"})))
    if not available(query) or 0 in (*query.shape, *call.key.shape):
        return (Refusal("it needs Triton, a CUDA device, D ≤ {dim}, no float64 and no empty tensor", dim=LARGEST_DIM),)
    if CHECK.passes(query.device, query.dtype):
        return ()
    return (Refusal("it did not pass its check on {device} in {dtype}", device=query.device, dtype=query.dtype),)


def table() -> dict[str, str]:
    """``ok`` or what is wrong, on each CUDA device and in each dtype, for ``clearhead doctor``. Empty without any."""
    # A driver that is too old for PyTorch may count devices that cannot be used.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", number) for number in range(count)]
    return {
        f"{device} {str(dtype).removeprefix('torch.')}": CHECK.problem(device, dtype) or "ok"
        for device in devices
        for dtype in DTYPES
        if available(torch.empty(1, 1, 1, 1, dtype=dtype, device=device))
    }


def errors(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The largest error of each result in a small call, relative to numbers above 1."""
    generator, shapes = torch.Generator().manual_seed(0), ((2, 4, 67, 40), (2, 2, 133, 40))
    query, key = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    # The second item has rows without a visible key.
    mask = masks.sliding_window(50, 20) & masks.lengths(torch.tensor([133, 9], device=device))
    with torch.no_grad(), autocast_off(query):
        expected = _by_reference(valid_call(Call(query.double(), key.double(), key.double(), mask, sinks=sinks)))
        results = _by_kernels(valid_call(Call(query, key, key, mask, sinks=sinks)), expected)
        largest = torch.stack([_error(results[name], judge) for name, judge in expected.items()])
    return dict(zip(expected, largest.tolist(), strict=True))


def _compare(device: torch.device, dtype: torch.dtype) -> str | None:
    wrong = {name: error for name, error in errors(device, dtype).items() if not error <= TOLERANCE}
    return ", ".join(f"{name} is wrong by {error:.2g}" for name, error in wrong.items()) or None


CHECK = FirstCheck(
    "The Triton kernels for weights and statistics", "PyTorch's operators compute them, which is slower.", _compare
)


def _by_kernels(call: Call, names: Collection[str]) -> dict[str, Tensor]:
    from ._triton import _calls  # imports Triton

    operands, sinks = operands_of(call), call.finite_sinks
    first = torch.arange(call.key.shape[2], device=call.query.device)[None, None] < 1
    results = _calls.rows(operands, sinks=sinks, first_keys=first, want=names, top=_TOP)
    lse = results["lse"]
    results["received"], results["viewers"] = _calls.columns(operands, lse)
    results["weights"] = _calls.weights(operands, lse)
    results["averaged weights"] = _calls.weights(operands, lse, average=True)
    results["map"] = _calls.pooled(operands, lse, _CELLS)
    results["largest of the map"] = _calls.pooled(operands, lse, _CELLS, largest=True)
    of_weights = _gradient_of(results["weights"])
    results["gradient of the query"], results["gradient of the key"], _ = _calls.weights_gradients(
        operands, lse, of_weights
    )
    return results


def _by_reference(call: Call) -> dict[str, Tensor]:
    weights, lse = reference_weights(call)  # (B, H, L, S), (B, H, L)
    scores, group, gradient = reference_scores(call), call.layout.group, _gradient_of(weights)
    # By the formula: autograd records nothing in inference mode, and calls the hooks of users' checkpoints.
    of_scores = weights * (gradient - (weights * gradient).sum(-1, keepdim=True)) * call.layout.scale
    of_query = of_scores @ call.key.repeat_interleave(group, 1)  # (B, H, L, D)
    of_key = (of_scores.mT @ call.query).unflatten(1, (-1, group)).sum(2)  # (B, Hkv, S, D)
    places = torch.arange(max(weights.shape), device=weights.device)
    distances = (places[: weights.shape[2], None] - places[: weights.shape[3]]).abs()
    lines, columns = (places[:n] * cells // n for n, cells in zip(weights.shape[2:], _CELLS, strict=True))
    numbers = torch.arange(_CELLS[0] * _CELLS[1], device=weights.device).view(-1, 1, 1)
    is_inside = lines[:, None] * _CELLS[1] + columns == numbers  # (cells, L, S)
    of_cells = weights[:, :, None] * is_inside  # (B, H, cells, L, S)
    visible = scores > float("-inf")
    top, keys = weights.topk(_TOP, -1)
    return {
        "lse": lse,
        "entropy": torch.special.entr(weights).sum(-1),
        "max_logit": scores.amax(-1),
        "confidence": weights.amax(-1),
        "sink": weights[..., 0],
        "distance": (weights * distances).sum(-1),
        "visible": visible.sum(-1),
        "received": weights.sum(2),
        "viewers": visible.sum(2),
        "top_weights": top,
        "weights": weights,
        "averaged weights": weights.mean(1),
        "map": of_cells.sum((-2, -1)).unflatten(2, _CELLS),
        "largest of the map": of_cells.amax((-2, -1)).unflatten(2, _CELLS),
        "top_keys": keys.masked_fill(top == 0, -1),
        "gradient of the query": of_query,
        "gradient of the key": of_key,
    }


def _gradient_of(weights: Tensor) -> Tensor:
    """A gradient of the weights: whole numbers −3 … 3, which every dtype has."""
    return (torch.arange(weights.numel(), device=weights.device).view(weights.shape) % 7 - 3).to(weights.dtype)


def _error(result: Tensor, expected: Tensor) -> Tensor:
    result, expected = (x.double().nan_to_num(nan=1e9, neginf=-1e6) for x in (result, expected))
    return ((result - expected).abs() / expected.abs().clamp(min=1)).amax()
