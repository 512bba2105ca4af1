"""Derivatives of `MultiHeadAttention` and `attention_varlen` over their options: first, second and many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import MultiHeadAttention, masks
from clearhead.caches import Cache, CrossKVCache, EvictingKVCache, KVCache, SinksAndRecent, SlidingKVCache
from clearhead.positions import ALiBi, RelativeBias, Rotary
from tests.support.budgets import in_turn
from tests.support.derivatives import WEIGHTS, check_derivatives, check_module, check_vectorized, finite, random

B, L, S, E, H, D = 2, 5, 7, 12, 3, 4
LENGTHS = masks.lengths(torch.tensor([4, 0]))

#: A module, and the arguments of its call.
MODULES: dict[str, tuple[Callable[[], MultiHeadAttention], dict[str, Any]]] = {
    "unmasked": (lambda: MultiHeadAttention(E, H), {}),
    "causal": (lambda: MultiHeadAttention(E, H, bias=False), {"mask": masks.causal()}),
    "bool tensor": (lambda: MultiHeadAttention(E, H), {"mask": torch.arange(L * L).view(L, L) % 3 > 0}),
    "fixed bias": (lambda: MultiHeadAttention(E, H), {"mask": masks.bias(torch.linspace(-1, 1, L * L).view(L, L))}),
    "fully masked rows": (lambda: MultiHeadAttention(E, H), {"mask": LENGTHS}),
    "grouped heads": (lambda: MultiHeadAttention(E, H, num_kv_heads=1, head_dim=2, scale=0.3), {}),
    "dropout": (lambda: MultiHeadAttention(E, H, dropout=0.3), {"mask": masks.sliding_window(2, 1)}),
    "rotary": (lambda: MultiHeadAttention(E, H, position=Rotary(D)), {"positions": 3, "mask": masks.causal()}),
    "ALiBi": (lambda: MultiHeadAttention(E, H, mask=ALiBi(H)), {"mask": masks.causal()}),
    "relative bias": (lambda: MultiHeadAttention(E, H, mask=RelativeBias(H, 4, 5)), {}),
    "soft-cap": (lambda: MultiHeadAttention(E, H, softcap=1.5), {}),
    "sinks": (lambda: MultiHeadAttention(E, H, sinks=True), {"mask": LENGTHS}),
    "norms": (lambda: MultiHeadAttention(E, H, q_norm=nn.RMSNorm(D), k_norm=nn.RMSNorm(D)), {}),
    "everything": (
        lambda: MultiHeadAttention(
            E, H, num_kv_heads=1, sinks=True, softcap=1.5, dropout=0.3, mask=RelativeBias(H, 4, 5), position=Rotary(D)
        ),
        {"mask": masks.causal() & LENGTHS},
    ),
}
weights = pytest.mark.parametrize("weights", WEIGHTS)
every_module = in_turn({"name": MODULES}, {"weights": WEIGHTS})


@every_module
def test_module(name: str, weights: str) -> None:
    make, arguments = MODULES[name]
    check_module(make(), random(B, L, E), **arguments, **WEIGHTS[weights])


@weights
def test_cross_attention_of_several_features(weights: str) -> None:
    module = MultiHeadAttention(E, H, qdim=11, kdim=13, vdim=2)
    check_module(module, random(B, L, 11), random(B, S, 13), random(B, S, 2), **WEIGHTS[weights])


def test_without_a_batch() -> None:
    check_module(MultiHeadAttention(E, H), random(L, E))


CACHES: dict[str, Callable[[], Cache]] = {
    "KVCache": lambda: KVCache(B, H, S, D, dtype=torch.float64),
    "SlidingKVCache": lambda: SlidingKVCache(B, H, 3, D, dtype=torch.float64),
    "EvictingKVCache": lambda: EvictingKVCache(B, H, S, D, policy=SinksAndRecent(1), dtype=torch.float64),
    "CrossKVCache": CrossKVCache,
}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_queries_have_gradients_with_a_cache(make: Callable[[], Cache]) -> None:
    """Keys and values in a cache have no gradient. Queries and the output projection have one."""
    module = MultiHeadAttention(E, H).double()
    for projection in (module.k_proj, module.v_proj):
        projection.requires_grad_(False)
    x, memory = torch.randn(B, S, E, dtype=torch.float64), torch.randn(B, S, E, dtype=torch.float64)

    def function(*_: Tensor) -> Tensor:
        cache = make()
        if isinstance(cache, CrossKVCache):
            return torch.cat([module(x[:, :L], memory, cache=cache), module(x[:, L:], cache=cache)], 1)
        with torch.no_grad():  # a later step overwrites keys that the backward pass of an earlier one would need
            for place in range(S - 1):
                module(x[:, [place]], mask=masks.causal(), cache=cache)
        return module(x[:, S - 1 :], mask=masks.causal(), cache=cache)

    check_derivatives(function, *module.q_proj.parameters(), *module.out_proj.parameters(), fast=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_packed(dropout_p: float) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Any:
        torch.manual_seed(3)
        ends = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 7, 7])
        options = {"sinks": sinks, "softcap": 1.5, "dropout_p": dropout_p, "return_lse": True}
        return finite(clearhead.attention_varlen(query, key, value, *ends, masks.causal(), **options))

    inputs = random(5, 2, 3), random(7, 1, 3), random(7, 1, 2), random(2)
    check_derivatives(function, *inputs, fast=True)
    check_vectorized(function, *inputs)
