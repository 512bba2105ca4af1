"""The errors of the Triton kernels against float64, with every mask. On the CPU they run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import kernel_formulas
from clearhead import masks
from clearhead.kernels._triton import Operands, _calls
from clearhead.kernels._triton._launch import rows_launch
from clearhead.kernels._triton._tiles import tiles_for, tiles_over
from clearhead.kernels._triton._top_launch import GROUP_KEYS, best_launch, groups_launch
from clearhead.masks._bound import bind
from clearhead.masks._grid import Grid
from clearhead.masks._terms import terms_of
from clearhead.positions import ALiBi

BAR = 1e-5  # relative above 1, and for a received mass 10 times as much, relative to itself
TOP = 3
#: Masks with which the gradient is that of averaged weights, if one kind of gradient is enough.
AVERAGED = ("window", "mixed documents", "bias", "scale 0")
#: Uniform random numbers of a shape.
Random = Callable[..., Tensor]
#: By name: heads, length and random numbers to a mask, and other arguments of the call.
MASKS: dict[str, Callable[[int, int, Random], tuple[masks.Mask | None, dict[str, Any]]]] = {
    "none": lambda heads, length, random: (None, {}),
    "causal": lambda heads, length, random: (masks.causal(), {"softcap": 20.0, "sinks": random(heads)}),
    "window": lambda heads, length, random: (masks.sliding_window(length // 3, 5), {"scale": -0.3}),
    "lengths": lambda heads, length, random: (masks.causal() & masks.lengths((random(2) * length).long()), {}),
    "no keys": lambda heads, length, random: (
        masks.lengths((random(2) * 0).long()),
        {"sinks": random(heads).log() - torch.inf},
    ),
    "documents": lambda heads, length, random: (
        masks.causal() & masks.documents((random(2, length) * 4).long().sort(1).values),
        {},
    ),
    "mixed documents": lambda heads, length, random: (masks.documents((random(2, length) * 3).long()), {}),
    "ALiBi": lambda heads, length, random: (masks.causal() & ALiBi(heads), {}),
    "keep": lambda heads, length, random: (
        masks.keep(random(2, heads, length, length) > 0.5),
        {"sinks": random(heads)},
    ),
    "bias": lambda heads, length, random: (
        masks.bias(random(1, heads, length, length).masked_fill(random(length, length) > 0.5, -torch.inf)),
        {},
    ),
    "drop keys": lambda heads, length, random: (masks.drop(keys=random(2, length) > 0.5), {}),
    "prefix": lambda heads, length, random: (masks.causal() | masks.prefix(9), {}),
    "scale 0": lambda heads, length, random: (
        masks.causal() & masks.lengths((random(2) * length).long()),
        {"scale": 0.0},
    ),
    "scale < 0": lambda heads, length, random: (
        masks.causal() & masks.drop(keys=random(2, length) > 0.5),
        {"scale": -0.5},
    ),
}


def errors_of(
    name: str,
    dtype: torch.dtype,
    dim: int,
    device: torch.device,
    *,
    length: int,
    heads: int,
    thorough: bool,
    batch: int = 2,
) -> dict[str, float]:
    """The error of each statistic with one mask; 1 for each wrong key of the top, ∞ for other bits the second time.

    What takes long in the interpreter is done only if `thorough`: the top of all rows, together with the statistics,
    and not of the last rows alone; gradients of full and of averaged weights; received mass, maps and gradients a
    second time. Masks that differ between batch items take a `batch` of 2.
    """
    draw = torch.Generator(device=device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=draw)

    mask, options = MASKS[name](heads, length, random)
    sinks = options.pop("sinks", None)
    # Heads lie inside a row, as a projection leaves them.
    query = torch.randn(batch, length, heads, dim, device=device, generator=draw).to(dtype).transpose(1, 2)
    key = torch.randn(batch, length, heads // 2, dim, device=device, generator=draw).to(dtype).transpose(1, 2)
    grid = Grid(batch, heads, length, length, device)
    terms = terms_of(bind(mask, grid)).with_all_ranges()
    operands = Operands(query, key, terms, **{"scale": dim**-0.5} | options)
    first = (torch.arange(length, device=device) < 4).expand(batch, 1, length)
    counted = random(batch, length) > 0.2

    of_rows: dict[str, Any] = {"sinks": sinks, "first_keys": first}
    exact = kernel_formulas.rows(operands, **of_rows)
    found = _calls.rows(operands, **of_rows, want=exact.keys(), top=TOP if thorough else 0)
    errors = {each: _error(found[each], exact[each], 1.0) for each in exact}
    if thorough:
        alone = _calls.rows(operands, **of_rows, want=exact.keys())
        errors |= {f"{each} alone": _error(alone[each], exact[each], 1.0) for each in exact}
    lse, exact_lse = found["lse"], exact["lse"]
    received, viewers = _calls.columns(operands, lse, counted)
    of_keys = kernel_formulas.columns(operands, exact_lse, counted)
    errors["received"] = _error(received, of_keys[0], 1e-3) / 10
    errors["viewers"] = _error(viewers, of_keys[1], 1.0)
    if thorough:
        same = torch.equal(received, _calls.columns(operands, lse, counted)[0])
        errors["bits"] = 0.0 if same else float("inf")
    exact_weights = kernel_formulas.weights(operands, exact_lse)
    errors["weights"] = _error(_calls.weights(operands, lse), exact_weights, 1.0)
    errors["averaged"] = _error(_calls.weights(operands, lse, average=True), exact_weights.mean(1), 1.0)
    chosen = (random(9) * length).long()
    found_rows = _calls.weights(operands.of_rows(chosen), lse[:, :, chosen])
    errors["chosen weights"] = _error(found_rows, exact_weights[:, :, chosen], 1.0)
    # Cells smaller than a tile in one direction, and larger in the other, or smaller in both.
    small = (9, 9) if name == "causal" and thorough else (9, 1)
    for each, cells, largest in (("map", small, False), ("largest of the map", (1, 9), True)):
        found_map = _calls.pooled(operands, lse, cells, counted=counted, largest=largest)
        errors[each] = _error(found_map, kernel_formulas.pooled(exact_weights, cells, counted, largest), 1.0)
        if thorough:
            same = torch.equal(found_map, _calls.pooled(operands, lse, cells, counted=counted, largest=largest))
            errors["bits"] = errors["bits"] if same else float("inf")
    best, best_places = kernel_formulas.top(operands, exact_lse, TOP)
    top = (found["top_weights"], found["top_keys"]) if thorough else _top_of_last(operands, 6, **of_rows)
    errors["top"] = _error(top[0], best[:, :, -top[0].shape[2] :], 1.0)
    errors["keys of the top"] = float((top[1] != best_places[:, :, -top[0].shape[2] :]).sum())
    of_heads = (heads, 1) if thorough else (1,) if name in AVERAGED else (heads,)
    for of_weights in [random(batch, each, length, length) - 0.5 for each in of_heads]:
        of_gradients = _errors_of_gradients(operands, lse, exact_weights, of_weights, repeated=thorough)
        errors |= {each: max(error, errors.get(each, 0.0)) for each, error in of_gradients.items()}
    return errors


def _errors_of_gradients(
    operands: Operands, lse: Tensor, exact_weights: Tensor, of_weights: Tensor, *, repeated: bool
) -> dict[str, float]:
    """The errors of gradients relative to their largest number; if `repeated`, also ∞ for other bits the next time."""
    found = _calls.weights_gradients(operands, lse, of_weights)
    exact = kernel_formulas.gradients(operands, exact_weights, of_weights)
    errors = {
        name: _error(ours, judge, float(judge.abs().max()) or 1.0)
        for name, ours, judge in zip(("dq", "dk", "Σ p dp"), found, exact, strict=True)
    }
    if repeated and not all(map(torch.equal, found, _calls.weights_gradients(operands, lse, of_weights))):
        errors["bits"] = float("inf")
    return errors


def _top_of_last(operands: Operands, count: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The largest weights of the last rows, and their keys: the last part of `rows_and_top`."""
    query = operands.query
    shape, row = query.shape[:3], query.shape[2] - count
    weights, keys = (query.new_empty((*shape, TOP), dtype=dtype) for dtype in (torch.float32, torch.int64))
    out = query.new_empty((1, *shape), dtype=torch.float32)
    groups = tiles_over(operands.key.shape[2], GROUP_KEYS)
    maxima = query.new_empty((*shape[:2], count, groups), dtype=torch.float32)
    tiles = tiles_for("top", operands)
    launch = rows_launch(operands, ("lse",), **options, tiles=tiles, out=out, row=row, maxima=maxima)
    launch.run()
    (chosen,) = groups_launch(launch, maxima, min(TOP, groups)).run()
    best_launch(launch, chosen, out[0], (weights, keys)).run()
    return weights[:, :, row:], keys[:, :, row:]


def wrong_numbers(errors: dict[str, float]) -> dict[str, float]:
    """Those above the bar."""
    return {name: error for name, error in errors.items() if not error <= BAR}


def _error(found: Tensor, expected: Tensor, least: float) -> float:
    """The largest error, relative to numbers above `least`; ∞ where infinities or NaN differ."""
    found = found.double()
    finite = expected.isfinite()
    if not torch.equal(found[~finite], expected[~finite]) or not bool(found[finite].isfinite().all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    differences = (found[finite] - expected[finite]).abs() / expected[finite].abs().clamp(min=least)
    return float(differences.max())
