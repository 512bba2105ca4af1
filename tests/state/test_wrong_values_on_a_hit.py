"""Wrong arguments raise the same error whether or not the cache holds a plan of a call like it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import clearhead
from clearhead import masks
from tests.support.exact import exact_attention
from tests.support.forgetting import forget

B, H, KV, L, S, D = 2, 6, 3, 5, 7, 11

#: A valid call by its options, and what is wrong in the next one.
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sinks: dtype": ({"sinks": torch.zeros(H)}, {"sinks": torch.zeros(H, dtype=torch.int64)}),
    "sinks: count": ({"sinks": torch.zeros(H)}, {"sinks": torch.zeros(H + 1)}),
    "sinks: device": ({"sinks": torch.zeros(H)}, {"sinks": torch.zeros(H, device="meta")}),
    "sinks: a list": ({"sinks": torch.zeros(H)}, {"sinks": [0.0] * H}),
    "query_positions: count": ({"query_positions": torch.arange(L)}, {"query_positions": torch.arange(L + 1)}),
    "query_positions: dtype": ({"query_positions": torch.arange(L)}, {"query_positions": torch.arange(L).float()}),
    "query_positions: device": (
        {"query_positions": torch.arange(L)},
        {"query_positions": torch.arange(L, device="meta")},
    ),
    "query_positions: negative": ({"query_positions": 2}, {"query_positions": -2}),
    "query_positions: a bool": ({"query_positions": 1}, {"query_positions": True}),
    "key_positions: heads": (
        {"key_positions": torch.arange(S).expand(B, H, S)},
        {"key_positions": torch.arange(S).expand(B, KV, S)},
    ),
    "mask: lengths": ({"mask": masks.lengths(torch.tensor([3, 7]))}, {"mask": masks.lengths(torch.tensor([3, 8]))}),
    "mask: items": ({"mask": masks.lengths(torch.tensor([3, 7]))}, {"mask": masks.lengths(torch.tensor([3, 7, 1]))}),
    "mask: dtype": ({"mask": torch.ones(L, S, dtype=torch.bool)}, {"mask": torch.ones(L, S)}),
    "mask: a string": ({"mask": masks.causal()}, {"mask": "causal"}),
    "scale: not finite": ({"scale": 0.5}, {"scale": float("nan")}),
    "scale: a bool": ({"scale": 1.0}, {"scale": True}),
    "softcap: zero": ({"softcap": 2.0}, {"softcap": 0.0}),
    "softcap: a bool": ({"softcap": 1.0}, {"softcap": True}),
    "dropout_p: range": ({"dropout_p": 1.0}, {"dropout_p": 1.5}),
    "dropout_p: a bool": ({"dropout_p": 1.0}, {"dropout_p": True}),
    "return_lse: a string": ({"return_lse": True}, {"return_lse": "yes"}),
    "key: dtype": ({}, {"key": torch.zeros(B, KV, S, D, dtype=torch.float64)}),
    "key: device": ({}, {"key": torch.zeros(B, KV, S, D, device="meta")}),
    "query: device": ({}, {"query": torch.zeros(B, H, L, D, device="meta")}),
    "value: device": ({}, {"value": torch.zeros(B, KV, S, D, device="meta")}),
    "key: dimensions": ({}, {"key": torch.zeros(KV, S, D)}),
    "key: sparse": ({}, {"key": torch.zeros(B, KV, S, D).to_sparse()}),
    "value: length": ({}, {"value": torch.zeros(B, KV, S + 1, D)}),
    "value: a list": ({}, {"value": [0.0]}),
    "value: None": ({}, {"value": None}),
    "query: batch": ({}, {"query": torch.zeros(B + 1, H, L, D)}),
    "query: heads": ({}, {"query": torch.zeros(B, H + 1, L, D)}),
}


def _error(options: dict[str, Any]) -> tuple[type[BaseException], str]:
    operands = {
        "query": torch.zeros(B, H, L, D),
        "key": torch.zeros(B, KV, S, D),
        "value": torch.zeros(B, KV, S, D),
    }
    with pytest.raises(clearhead.errors.ClearheadError) as caught:
        clearhead.attention(**operands | options)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("case", WRONG)
def test_a_hit_raises_what_a_miss_raises(case: str) -> None:
    right, wrong = WRONG[case]
    forget()
    missed = _error(wrong)
    assert missed[1].startswith(case.split(":")[0]) or "query" in missed[1]
    query, key = torch.zeros(B, H, L, D), torch.zeros(B, KV, S, D)
    clearhead.attention(query, key, key, **right)
    assert _error(right | wrong) == missed


# The same call on two devices, in both orders: each result lies where its inputs do.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_devices_in_turn(causal: bool, learns: bool) -> None:
    inputs = [torch.randn(2, 3, 5, 7) for _ in range(3)]
    mask = masks.causal() if causal else None
    visible = torch.ones(5, 5).tril().bool()[None, None] if causal else None
    expected = exact_attention(*inputs, visible).output
    for order in itertools.permutations(("cpu", "meta")):
        forget()
        for device in (*order, *order):
            output = clearhead.attention(*(x.to(device).requires_grad_(learns) for x in inputs), mask)
            assert output.device.type == device
            assert output.requires_grad == learns
            if device == "cpu":
                torch.testing.assert_close(output.detach().double(), expected, rtol=0, atol=1e-5)
