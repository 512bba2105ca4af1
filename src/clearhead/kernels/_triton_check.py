"""The Triton kernels are compared with `reference` once on each device, before their results are used."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import masks
from .._call.call import AttentionCall, valid_call
from .._call.request import Request
from .._environment import autocast_off
from ._first_check import FirstCheck
from ._reference import reference_scores, reference_weights
from ._triton import columns, pooled, rows, terms_of, weights_gradients
from ._triton import weights as weights_by_kernel
from ._triton._available import DTYPES, available
from ._triton._formula import gradients_by_formula, pooled_by_formula

#: The largest error of a result, relative to numbers above 1. Both sides read the same rounded query and key.
TOLERANCE = 1e-3
_TOP = 8
_CELLS = (3, 2)


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
    request = Request(mask, sinks=sinks)
    with torch.no_grad(), autocast_off(query):
        found = _by_kernels(valid_call(query, key, None, request))
        expected = _by_reference(valid_call(query.double(), key.double(), None, request))
        largest = torch.stack([_error(found[name], judge) for name, judge in expected.items()])
    return dict(zip(expected, largest.tolist(), strict=True))


def _compare(device: torch.device, dtype: torch.dtype) -> str | None:
    wrong = {name: error for name, error in errors(device, dtype).items() if not error <= TOLERANCE}
    return ", ".join(f"{name} is wrong by {error:.2g}" for name, error in wrong.items()) or None


CHECK = FirstCheck(
    "The Triton kernels for weights and statistics", "PyTorch's operators compute them, which is slower.", _compare
)


def _by_kernels(call: AttentionCall) -> dict[str, Tensor]:
    operands, terms, scale = (call.query, call.key), terms_of(call), call.spec.scale
    names = ("lse", "entropy", "max_logit", "confidence", "sink", "distance", "visible")
    first = torch.arange(call.key.shape[2], device=call.query.device)[None, None] < 1
    found = rows(*operands, terms, scale=scale, sinks=call.request.sinks, first_keys=first, want=names, top=_TOP)
    found["received"], found["viewers"] = columns(*operands, found["lse"], terms, scale=scale)
    found["weights"] = weights_by_kernel(*operands, found["lse"], terms, scale=scale)
    found["averaged weights"] = weights_by_kernel(*operands, found["lse"], terms, scale=scale, average=True)
    found["map"] = pooled(*operands, found["lse"], terms, _CELLS, scale=scale)
    found["largest of the map"] = pooled(*operands, found["lse"], terms, _CELLS, scale=scale, largest=True)
    of_weights = _gradient_of(found["weights"])
    of_query, of_key, _ = weights_gradients(*operands, found["lse"], of_weights, terms, scale=scale)
    found["gradient of the query"], found["gradient of the key"] = of_query, of_key
    return found


def _by_reference(call: AttentionCall) -> dict[str, Tensor]:
    weights, lse = reference_weights(call)  # (B, H, L, S), (B, H, L)
    scores, places = reference_scores(call), torch.arange(max(weights.shape), device=weights.device)
    distances = (places[: weights.shape[2], None] - places[: weights.shape[3]]).abs()
    visible = scores > float("-inf")
    top, keys = weights.topk(_TOP, -1)
    of_query, of_key, _ = gradients_by_formula(call.query, call.key, weights, _gradient_of(weights), call.spec.scale)
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
        "map": pooled_by_formula(weights, None, _CELLS, largest=False),
        "largest of the map": pooled_by_formula(weights, None, _CELLS, largest=True),
        "top_keys": keys.masked_fill(top == 0, -1),
        "gradient of the query": of_query,
        "gradient of the key": of_key,
    }


def _gradient_of(weights: Tensor) -> Tensor:
    """A gradient of the weights: whole numbers −3 … 3, which every dtype has."""
    return (torch.arange(weights.numel(), device=weights.device).view(weights.shape) % 7 - 3).to(weights.dtype)


def _error(found: Tensor, expected: Tensor) -> Tensor:
    found, expected = (x.double().nan_to_num(nan=1e9, neginf=-1e6) for x in (found, expected))
    return ((found - expected).abs() / expected.abs().clamp(min=1)).amax()
