"""`MultiHeadLatentAttention` computes the formula, in both forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.caches import CrossKVCache
from clearhead.masks import Mask
from clearhead.positions import ALiBi, RelativeBias
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.derivatives import WEIGHTS, check_derivatives, check_module, random

from .by_hand import CAUSAL, FEW, LOW, NOPE, ROPE, VALUE, B, E, H, L, by_hand, fed, module, tokens

MASKS = [
    None,
    CAUSAL,
    masks.sliding_window(2, 1),
    masks.lengths(torch.tensor([5, 0])),
    masks.causal() & masks.prefix(3),
]


@pytest.mark.parametrize("mask", MASKS, ids=["none", "causal", "window", "lengths", "combined"])
@pytest.mark.parametrize("low", [None, LOW])
def test_it_computes_the_formula(low: int | None, mask: Mask | None) -> None:
    attend, x = module(low, bias=True), tokens()
    output, weights = by_hand(attend, x, mask)
    require_near(attend(x, mask=mask), output, 1e-13)
    result, per_head = attend(x, mask=mask, need_weights=True, average_attn_weights=False)
    require_near(result, output, 1e-13)
    require_near(per_head, weights, 1e-13)
    require_near(attend(x, mask=mask, need_weights=True)[1], weights.mean(1), 1e-13)


@pytest.mark.parametrize("options", [{"mask": masks.sliding_window(2, 0)}, {"scale": 0.7}], ids=["mask", "scale"])
def test_settings_of_a_module(options: dict[str, Any]) -> None:
    attend, x = module(**options), tokens()
    require_near(
        attend(x, mask=CAUSAL), by_hand(attend, x, CAUSAL & options["mask"] if "mask" in options else CAUSAL)[0], 1e-13
    )
    require_near(fed(attend, x, attend.make_cache(B, L), [FEW + 1, 1, 4]), attend(x, mask=CAUSAL), 1e-13)


def test_another_source_of_keys() -> None:
    attend, x, memory = module(position=None), tokens(), torch.randn(B, 19, E).double()
    expected, _ = by_hand(attend, x, memory=memory)
    require_near(attend(x, memory), expected, 1e-13)
    require_near(attend(x, memory, memory), expected, 1e-13)
    cache = CrossKVCache()
    with torch.no_grad():
        require_near(attend(x[:, :8], memory, cache=cache), expected[:, :8], 1e-13)
        require_near(attend(x[:, 8:], cache=cache), expected[:, 8:], 1e-13)
        require_near(
            attend(x[:, 8:], x, cache=cache), expected[:, 8:], 1e-13
        )  # what later calls bring is not looked at


def test_without_a_batch() -> None:
    attend, x = module(), tokens()
    output, weights = attend(x[0], mask=CAUSAL, need_weights=True, average_attn_weights=False)
    expected, theirs = by_hand(attend, x, CAUSAL)
    require_near(output, expected[0], 1e-13)
    require_near(weights, theirs[0], 1e-13)


def test_the_default_scale() -> None:
    assert module().scale == (NOPE + ROPE) ** -0.5


def test_nothing_seen_gives_the_output_of_zero() -> None:
    attend, x = module(out_bias=True), tokens()
    nothing = attend.out_proj(torch.zeros(H * VALUE).double())
    hidden = masks.keep(torch.zeros(1, 1, 1, 1).bool())
    require_near(attend(x, mask=hidden)[0, 0], nothing, 1e-13)
    with torch.no_grad():
        require_near(attend(x[:, :1], mask=hidden, cache=attend.make_cache(B, 1))[0, 0], nothing, 1e-13)


# Derivatives of latent attention over its options: first, second and many at once.


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
    check_module(module(**options).train(), random(B, L, E), **call, **WEIGHTS[weights])


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
