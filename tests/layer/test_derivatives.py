"""Derivatives of the modules, of `attention_varlen` and of the drop-in function: first, second and many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import MultiHeadAttention, masks
from clearhead.caches import Cache, CrossKVCache, EvictingKVCache, KVCache, SinksAndRecent, SlidingKVCache
from clearhead.nn import MultiheadAttention as DropIn
from clearhead.positions import ALiBi, RelativeBias, Rotary
from tests.support.budgets import in_turn
from tests.support.derivatives import WEIGHTS, check_derivatives, check_module, check_vectorized, finite, random

B, L, S, E, H, D = 2, 5, 7, 12, 3, 4
LENGTHS = masks.lengths(torch.tensor([4, 0]))
HIDDEN = torch.arange(L * L).view(L, L) % 4 == 1
PER_HEAD = HIDDEN.repeat(B * H, 1, 1).logical_xor(torch.arange(B * H).view(-1, 1, 1) % 2 == 0)
PADDED = torch.arange(L).expand(B, L) >= torch.tensor([[3], [0]])  # one item is padding alone
APPENDED: dict[str, Any] = {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.3}

#: A module, and the arguments of its call.
MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
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
    **{
        f"drop-in, {name}{', batch first' if first else ''}": (
            lambda first=first, options=options: DropIn(E, H, batch_first=first, **options),
            {"key_padding_mask": PADDED},
        )
        for name, options in {"plain": {}, "no bias": {"bias": False}, "appended keys": APPENDED}.items()
        for first in (False, True)
    },
    **{
        f"drop-in, {name}": (lambda: DropIn(E, H, batch_first=True), call)
        for name, call in {
            "unmasked": {},
            "causal": {"is_causal": True},
            "attn_mask": {"attn_mask": HIDDEN},
            "per head": {"attn_mask": PER_HEAD},
            "float masks": {"attn_mask": HIDDEN.double(), "key_padding_mask": PADDED.double()},
            "fully masked rows": {"key_padding_mask": PADDED, "attn_mask": HIDDEN},
        }.items()
    },
}
weights = pytest.mark.parametrize("weights", WEIGHTS)


@in_turn({"name": MODULES}, {"weights": WEIGHTS})
def test_self_attention(name: str, weights: str) -> None:
    make, call = MODULES[name]
    module, batch_first = make(), True
    if isinstance(module, DropIn):
        batch_first = module.batch_first
        module.register_forward_pre_hook(lambda _module, args: args * 3)  # one input is query, key and value
    check_module(module, random(*((B, L) if batch_first else (L, B)), E), **call, **WEIGHTS[weights])


#: Modules with inputs of several features.
CROSS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: MultiHeadAttention(E, H, qdim=11, kdim=13, vdim=2),
    "drop-in": lambda: DropIn(E, H, kdim=13, vdim=2),
    "drop-in, batch first": lambda: DropIn(E, H, kdim=13, vdim=2, batch_first=True),
}


@in_turn({"name": CROSS}, {"weights": WEIGHTS}, whole=lambda name: name == "ours")
def test_cross_attention_of_several_features(name: str, weights: str) -> None:
    module, sizes = CROSS[name](), ((L, 11 if name == "ours" else E), (S, 13), (S, 2))
    order = (lambda n: (n, B)) if name == "drop-in" else (lambda n: (B, n))
    check_module(module, *(random(*order(length), features) for length, features in sizes), **WEIGHTS[weights])


def test_without_a_batch() -> None:
    check_module(MultiHeadAttention(E, H), random(L, E))


@weights
def test_masks_of_the_drop_in_that_learn(weights: str) -> None:
    module = DropIn(E, H).double()

    def function(x: Tensor, attn_mask: Tensor, padding: Tensor, *_: Tensor) -> Any:
        output, *rest = module(x, x, x, padding, attn_mask=attn_mask, **WEIGHTS[weights])
        return output if rest == [None] else (output, *rest)

    check_derivatives(function, random(L, B, E), random(L, L), random(B, L), *module.parameters(), fast=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_drop_in_function(is_causal: bool) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return clearhead.nn.functional.scaled_dot_product_attention(
            query, key, value, bias, is_causal=is_causal, enable_gqa=True
        )

    check_derivatives(function, random(B, H, L, 4), random(B, 1, S, 4), random(B, 1, S, 2), random(L, S), fast=True)


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
