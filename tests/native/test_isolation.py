"""NaN and infinity in what masks hide altogether reach no result of the native kernel, which sets nothing to zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.native import SETS, needs_native, on_every_set

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 13, 7
SIZES = [(5, 11), (61, 307), (1, 67), (3, 4999)]

pytestmark = needs_native


def padding(length: int, count: int) -> Tensor:
    """(B, 1, 1, S), of which most keys of the second item are padding."""
    seen = torch.ones(BATCH, 1, 1, count, dtype=torch.bool)
    seen[0, ..., count // 2] = seen[1, ..., 2 * count // 3 :] = False
    return seen


def cells(length: int, count: int) -> Tensor:
    """(B, H, L, S) with rows, and keys of groups of heads, that are hidden altogether."""
    seen = torch.rand(BATCH, HEADS, length, count, generator=torch.Generator().manual_seed(7)) < 0.5
    seen[:, :, length // 2] = False
    seen[0, 0, 0] = False
    seen[1, :2, :, count // 3] = False
    seen[..., 3] = False
    return seen


def bias_of(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


def ranges(length: int, count: int) -> masks.Mask:
    """Other columns for each row, and none for one of them."""
    ends = (torch.arange(length).remainder(3) + torch.tensor([[count // 2], [2]])).clamp(max=count)
    ends[:, length // 2] = 0
    return masks.lengths(ends) & masks.documents(torch.arange(length + count) // 97)


MASKS: dict[str, Callable[[int, int], masks.Mask]] = {
    "band": lambda length, count: masks.sliding_window(0, 38) & masks.prefix(count - 1),
    "ranges": ranges,
    "padding": lambda *sizes: masks.keep(padding(*sizes)),
    "padding, bias": lambda *sizes: masks.bias(bias_of(padding(*sizes))),
    "padding, causal": lambda *sizes: masks.keep(padding(*sizes)) & masks.causal(),
    "cells": lambda *sizes: masks.keep(cells(*sizes)),
    "cells, bias": lambda *sizes: masks.bias(bias_of(cells(*sizes))),
    "cells, causal": lambda *sizes: masks.keep(cells(*sizes)) & masks.causal(),
}


def operands(
    length: int, count: int, *, kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient."""
    shapes = ((HEADS, length, DIM), (kv_heads, count, DIM), (kv_heads, count, VALUE_DIM), (HEADS, length, VALUE_DIM))
    return tuple(torch.randn(BATCH, *shape).to(dtype) for shape in shapes)


def results(mask: masks.Mask, tensors: tuple[Tensor, ...], gradient: Tensor, **options: Any) -> dict[str, Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with clearhead.use_kernel("native"):
        output, lse = clearhead.attention(*leaves, mask, return_lse=True, **options)
    gradients = torch.autograd.grad(output, leaves, gradient)
    return {"output": output, "lse": lse, **dict(zip(("query", "key", "value"), gradients, strict=True))}


@on_every_set(
    {"name": MASKS, "dtype": [torch.float32, torch.bfloat16]},
    {"sizes": SIZES, "poison": [torch.nan, torch.inf, 3e38]},
    whole=SETS[:1],
    rest=SETS[1:],
)
def test_nothing_of_it_is_seen(
    name: str, dtype: torch.dtype, sizes: tuple[int, int], poison: float, instructions: str
) -> None:
    mask, places = MASKS[name](*sizes), {"query_positions": 2 if name == "band" else 0, "key_positions": 0}
    dense = mask.dense(*sizes, batch_size=BATCH, num_heads=HEADS, **places)
    seen = dense if dense.dtype == torch.bool else dense != -torch.inf  # (B, H, L, S)
    query, key, value, gradient = operands(*sizes, dtype=dtype)
    rows = ~seen.any(-1)[..., None]  # (B, H, L, 1)
    keys = ~seen.any(-2).unflatten(1, (KV_HEADS, -1)).any(2)[..., None]  # (B, Hkv, S, 1)
    assert rows.any() or keys.any()
    options = {"scale": 0.4, **places, **({"softcap": 1.5} if math.isfinite(poison) else {})}
    clean = results(mask, (query, key, value), gradient, **options)
    poisoned = (query.masked_fill(rows, poison), key.masked_fill(keys, poison), value.masked_fill(keys, poison))
    found = results(mask, poisoned, gradient.masked_fill(rows, poison), **options)
    for kind, expected in clean.items():
        largest = float(expected.detach().masked_fill(expected.isinf(), 0).abs().max())
        torch.testing.assert_close(found[kind], expected, rtol=0, atol=1e-5 * max(1.0, largest))
    for kind, hidden in {"output": rows, "query": rows, "key": keys, "value": keys}.items():
        assert not found[kind].masked_select(hidden).any()


def test_the_gradient_of_a_bias_is_not_counted_twice(instructions: str) -> None:
    seen = cells(61, 307)[:1]
    query, key, value, gradient = operands(61, 307, kv_heads=HEADS)
    found = []
    for poison in (0.0, torch.nan):
        key, value = (x.masked_fill(~seen.any(-2)[..., None], poison) for x in (key, value))
        bias = bias_of(seen).requires_grad_()
        with clearhead.use_kernel("native"):
            output = clearhead.attention(query, key, value, masks.bias(bias))
        found += torch.autograd.grad(output, bias, gradient)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


def test_statistics_are_not_counted_twice(instructions: str) -> None:
    seen = padding(61, 307)
    query, key, value, _ = operands(61, 307)
    names = ("output", "rows", "head_average", "received", "output_norm")
    found: list[list[Tensor]] = []
    for poison in (0.0, torch.nan):
        key, value = (x.masked_fill(~seen.transpose(2, 3), poison) for x in (key, value))
        statistics = clearhead.attention_statistics(query, key, masks.keep(seen), value=value, statistics=names)
        found.append([getattr(statistics, name) for name in names])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for weights in found[0][1:3]:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
