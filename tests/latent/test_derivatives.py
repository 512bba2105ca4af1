"""Derivatives of latent attention over its options: first, second and many at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.positions import ALiBi, RelativeBias
from tests.support.budgets import in_turn
from tests.support.derivatives import WEIGHTS, check_batched, check_derivatives, random

from .by_hand import CAUSAL, LOW, B, E, H, L, module

LENGTHS = masks.lengths(torch.tensor([3, 0]))
MODULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unmasked": ({}, {}),
    "queries without a latent": ({"low": None}, {"mask": CAUSAL}),
    "biases": ({"bias": True, "out_bias": True}, {"mask": masks.sliding_window(2, 1)}),
    "no position": ({"position": None, "scale": 0.3}, {}),
    "fully masked rows": ({}, {"mask": LENGTHS & CAUSAL}),
    "ALiBi": ({"mask": ALiBi(H)}, {"positions": 3}),
    "relative bias": ({"mask": RelativeBias(H, 4, 5)}, {"mask": CAUSAL}),
    "norms": ({"q_norm": nn.LayerNorm(LOW)}, {}),
    "dropout": ({"dropout": 0.3}, {"mask": CAUSAL}),
}


@in_turn({"name": MODULES}, {"weights": WEIGHTS})
def test_expanded(name: str, weights: str) -> None:
    options, call = MODULES[name]
    attend = module(**options).double().train()

    def function(x: Tensor, *_: Tensor) -> Any:
        torch.manual_seed(3)
        return attend(x, **call, **WEIGHTS[weights])

    check_derivatives(function, random(B, L, E), *attend.parameters(), fast=True)
    attend.float()
    leaves = (torch.randn(B, L, E, requires_grad=True), *attend.parameters())
    check_batched(function(*leaves), leaves)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_absorbed(weights: str) -> None:
    """With a cache, whose latents have no gradient."""
    attend = module()
    attend.kv_down.requires_grad_(False)
    attend.kv_norm.requires_grad_(False)
    x = torch.randn(B, 3, E, dtype=torch.float64)

    def function(*_: Tensor) -> Any:
        cache = attend.make_cache(B, 3)
        attend(x[:, :2], mask=CAUSAL, cache=cache)
        return attend(x[:, 2:], mask=CAUSAL, cache=cache, **WEIGHTS[weights])

    check_derivatives(function, *(leaf for leaf in attend.parameters() if leaf.requires_grad), fast=True)
