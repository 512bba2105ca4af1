"""NaN and infinity in what masks hide altogether reach no result of a plan, though nothing is set to zero before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead._call.spec import Layout
from clearhead.kernels._native_arguments import NativeArguments
from clearhead.kernels._native_plan import NativePlan
from tests.support.native import needs_native, on_every_set

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 13, 7
SIZES = [(5, 11), (61, 307), (1, 67), (3, 4999)]

pytestmark = needs_native


def _padding(length: int, count: int) -> Tensor:
    """(B, 1, 1, S), of which most keys of the second item are padding."""
    seen = torch.ones(BATCH, 1, 1, count, dtype=torch.bool)
    seen[0, ..., count // 2] = seen[1, ..., 2 * count // 3 :] = False
    return seen


def _rows_and_keys(length: int, count: int) -> Tensor:
    """(B, H, L, S) with rows, and keys of groups of heads, that are hidden altogether."""
    seen = torch.rand(BATCH, HEADS, length, count, generator=torch.Generator().manual_seed(7)) < 0.5
    seen[:, :, length // 2] = False
    seen[0, 0, 0] = False
    seen[1, :2, :, count // 3] = False
    seen[..., 3] = False
    return seen


def bias_of(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


def _spans(length: int, count: int) -> dict[str, Tensor]:
    first = torch.arange(length).remainder(3).expand(BATCH, -1).int().contiguous()
    last = (first + torch.tensor([[count // 2], [2]])).clamp(max=count).int()
    last[:, length // 2] = 0
    return {"first": first, "last": last}


Case = tuple[dict[str, Any], dict[str, Tensor], Tensor]


def case_of(name: str, length: int, count: int) -> Case:
    """Options of the plan, tensors of the call, and what is visible (B, H, L, S)."""
    rows, columns = torch.arange(length)[:, None], torch.arange(count)
    whole = (BATCH, HEADS, length, count)
    if name == "band":
        seen = (columns >= rows + 2) & (columns <= rows + 40) & (columns < count - 1)
        return {"low": 2, "high": 40, "stop": count - 1}, {}, seen.expand(whole)
    if name == "spans":
        spans = _spans(length, count)
        seen = (columns >= spans["first"][..., None]) & (columns < spans["last"][..., None])
        return {}, spans, seen[:, None].expand(whole)
    seen = _padding(length, count) if name.startswith("padding") else _rows_and_keys(length, count)
    if name.endswith("bias"):
        return {}, {"bias": bias_of(seen)}, seen.expand(whole)
    if name.endswith("causal"):
        return {"high": 0}, {"visible": seen}, (seen & (columns <= rows)).expand(whole)
    return {}, {"visible": seen}, seen.expand(whole)


def operands(
    length: int, count: int, *, kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient."""
    shapes = ((HEADS, length, DIM), (kv_heads, count, DIM), (kv_heads, count, VALUE_DIM), (HEADS, length, VALUE_DIM))
    return tuple(torch.randn(BATCH, *shape).to(dtype) for shape in shapes)


NAMES = ["band", "spans", "padding", "padding, bias", "padding, causal", "cells", "cells, bias", "cells, causal"]


def run(
    options: dict[str, Any], given: dict[str, Tensor], tensors: tuple[Tensor, ...], gradient: Tensor, **more: Any
) -> dict[str, Tensor]:
    layouts = {name: Layout.of(tensor) for name, tensor in given.items() if name != "last"}
    options = {**layouts, **options, **more}
    plan = NativePlan(tensors[0].dtype, *map(Layout.of, tensors), scale=0.4, differentiable=True, **options)
    arguments, lse = NativeArguments(*tensors, **given), plan.empty_lse(tensors[0])
    output = plan.forward(arguments, lse)
    dq, dk, dv, correction = plan.backward(arguments, output, lse, gradient)
    return {"output": output, "lse": lse, "query": dq, "key": dk, "value": dv, "correction": correction}


@on_every_set(
    {"name": NAMES, "dtype": [torch.float32, torch.bfloat16]}, {"sizes": SIZES, "poison": [torch.nan, torch.inf, 3e38]}
)
def test_nothing_of_it_is_seen(
    name: str, dtype: torch.dtype, sizes: tuple[int, int], poison: float, instructions: str
) -> None:
    length, count = sizes
    options = {"softcap": 1.5} if math.isfinite(poison) else {}
    band, given, seen = case_of(name, length, count)
    torch.manual_seed(3)
    query, key, value, gradient = operands(length, count, dtype=dtype)
    rows = ~seen.any(-1)[..., None]  # (B, H, L, 1)
    keys = ~seen.any(-2).unflatten(1, (KV_HEADS, -1)).any(2)[..., None]  # (B, Hkv, S, 1)
    assert rows.any() or keys.any()
    clean = run(band, given, (query, key, value), gradient, **options)
    poisoned = (query.masked_fill(rows, poison), key.masked_fill(keys, poison), value.masked_fill(keys, poison))
    found = run(band, given, poisoned, gradient.masked_fill(rows, poison), **options)
    for kind in ("output", "query", "key", "value", "lse"):
        largest = float(clean[kind].masked_fill(clean[kind].isinf(), 0).abs().max())
        torch.testing.assert_close(found[kind], clean[kind], rtol=0, atol=1e-5 * max(1.0, largest))
    for kind, hidden in {"output": rows, "query": rows, "key": keys, "value": keys}.items():
        assert not found[kind].masked_select(hidden).any()


def test_the_gradient_of_a_bias_is_not_counted_twice(instructions: str) -> None:
    length, count = 61, 307
    seen = _rows_and_keys(length, count)
    bias = bias_of(seen)[:1].contiguous()
    query, key, value, gradient = operands(length, count, kv_heads=HEADS)
    keys = ~seen[:1].any(-2)[..., None].expand(BATCH, -1, -1, -1)
    layouts = [Layout.of(tensor) for tensor in (query, key, value)]
    plan = NativePlan(
        torch.float32, *layouts, scale=0.4, differentiable=True, bias=Layout.of(bias), bias_gradient=tuple(bias.shape)
    )
    found = []
    for poison in (0.0, torch.nan):
        tensors = (query, key.masked_fill(keys, poison), value.masked_fill(keys, poison))
        arguments, lse, sums = (
            NativeArguments(*tensors, bias=bias),
            plan.empty_lse(query),
            plan.empty_bias_gradient(query),
        )
        plan.backward(arguments, plan.forward(arguments, lse), lse, gradient, None, sums)
        found.append(sums)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("average", [False, True])
def test_statistics_are_not_counted_twice(average: bool, instructions: str) -> None:
    length, count = 61, 307
    seen = _padding(length, count)
    query, key, value, _ = operands(length, count)
    plan = NativePlan(torch.float32, *map(Layout.of, (query, key, value)), scale=0.4, visible=Layout.of(seen))
    found: list[list[Tensor]] = []
    for poison in (0.0, torch.nan):
        hidden = ~seen.transpose(2, 3)
        tensors = (query, key.masked_fill(hidden, poison), value.masked_fill(hidden, poison))
        weights = torch.zeros(BATCH, 1 if average else HEADS, length, count)
        received, viewers, norm = (torch.zeros(BATCH, HEADS, n) for n in (count, count, length))
        output, step = plan.empty_output(query), length * count
        plan.statistics(
            NativeArguments(*tensors, visible=seen),
            output,
            weights=weights,
            weights_strides=(step, 0, count) if average else (HEADS * step, step, count),
            received=received,
            viewers=viewers,
            norm=norm,
        )
        found.append([output, weights, received, viewers, norm])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0][1].sum(-1), torch.ones(BATCH, 1 if average else HEADS, length))
