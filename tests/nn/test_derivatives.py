"""Derivatives of the drop-in over its options: first, second and many at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead.nn
from tests.support.budgets import in_turn
from tests.support.derivatives import WEIGHTS, check_derivatives, check_module, random

N, L, S, E, H, KEYS, VALUES = 2, 5, 7, 12, 3, 11, 13
HIDDEN = torch.arange(L * L).view(L, L) % 4 == 1
PADDED = torch.arange(L).expand(N, L) >= torch.tensor([[3], [0]])  # one item is padding alone

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "appended keys, with dropout": {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.3},
}
CALLS: dict[str, dict[str, Any]] = {
    "unmasked": {},
    "causal": {"is_causal": True},
    "attn_mask": {"attn_mask": HIDDEN},
    "per head": {"attn_mask": HIDDEN.repeat(N * H, 1, 1).logical_xor(torch.arange(N * H).view(-1, 1, 1) % 2 == 0)},
    "float masks": {"attn_mask": HIDDEN.double(), "key_padding_mask": PADDED.double()},
    "fully masked rows": {"key_padding_mask": PADDED, "attn_mask": HIDDEN},
}
weights = pytest.mark.parametrize("weights", WEIGHTS)


def check(module: clearhead.nn.MultiheadAttention, call: dict[str, Any], *inputs: Tensor) -> None:
    """One input is query, key and value."""
    if len(inputs) == 1:
        module.register_forward_pre_hook(lambda _module, args: args * 3)
    check_module(module, *inputs, **call)


@in_turn({"options": MODULES, "batch_first": [False, True]}, {"weights": WEIGHTS})
def test_modules(options: str, batch_first: bool, weights: str) -> None:
    module = clearhead.nn.MultiheadAttention(E, H, batch_first=batch_first, **MODULES[options])
    check(module, {"key_padding_mask": PADDED} | WEIGHTS[weights], random(*((N, L) if batch_first else (L, N)), E))


@in_turn({"call": CALLS}, {"weights": WEIGHTS})
def test_calls(call: str, weights: str) -> None:
    check(clearhead.nn.MultiheadAttention(E, H, batch_first=True), CALLS[call] | WEIGHTS[weights], random(N, L, E))


@in_turn({"batch_first": [False, True]}, {"weights": WEIGHTS})
def test_features_of_their_own(batch_first: bool, weights: str) -> None:
    module = clearhead.nn.MultiheadAttention(E, H, kdim=KEYS, vdim=VALUES, batch_first=batch_first)
    query, key, value = (
        random(*((N, length) if batch_first else (length, N)), features)
        for length, features in ((L, E), (S, KEYS), (S, VALUES))
    )
    check(module, WEIGHTS[weights], query, key, value)


@weights
def test_masks_that_learn(weights: str) -> None:
    module = clearhead.nn.MultiheadAttention(E, H).double()
    x, attn_mask, padding = random(L, N, E), random(L, L), random(N, L)

    def function(x: Tensor, attn_mask: Tensor, padding: Tensor, *_: Tensor) -> Any:
        output, *rest = module(x, x, x, padding, attn_mask=attn_mask, **WEIGHTS[weights])
        return output if rest == [None] else (output, *rest)

    check_derivatives(function, x, attn_mask, padding, *module.parameters(), fast=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_functional(is_causal: bool) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return clearhead.nn.functional.scaled_dot_product_attention(
            query, key, value, bias, is_causal=is_causal, enable_gqa=True
        )

    check_derivatives(function, random(N, H, L, 4), random(N, 1, S, 4), random(N, 1, S, 2), random(L, S), fast=True)
