"""Caches: making, writing, reordering and cropping them."""

from __future__ import annotations

from functools import cache as once
from typing import Any

import torch
import transformers

from clearhead import caches
from clearhead.caches import (
    EvictingKVCache,
    HeavyHitters,
    Held,
    KVCache,
    RandomEviction,
    SinksAndRecent,
    SlidingKVCache,
)
from clearhead.integrations.transformers import cache_for
from tests.malformed.calls import Call, case

B, KV, D = 2, 3, 4


def _held(cache: Any) -> Any:
    """The cache with five tokens written."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        cache.update(*(torch.randn(B, KV, 5, D, generator=draw) for _ in range(2)))
    return cache


def _next(cache: Any) -> Any:
    """What a next step gives."""

    def after() -> Any:
        draw = torch.Generator().manual_seed(4)
        found = cache.update(*(torch.randn(B, KV, 1, D, generator=draw) for _ in range(2)))
        return found.key, found.value, cache.length

    return after


MAKERS: dict[str, Any] = {
    "KVCache": lambda: KVCache(B, KV, 9, D),
    "SlidingKVCache": lambda: SlidingKVCache(B, KV, 6, D, max_crop=3),
    "EvictingKVCache": lambda: EvictingKVCache(B, KV, 4, D, policy=SinksAndRecent(1)),
    "CrossKVCache": caches.CrossKVCache,
}
ARGUMENTS: dict[str, Any] = {
    "update": lambda: {"key": torch.randn(B, KV, 2, D), "value": torch.randn(B, KV, 2, D), "positions": 5},
    "reorder": lambda: {"indices": torch.tensor([1, 0])},
    "crop": lambda: {"length": torch.tensor([4, 5])},
    "next_positions": lambda: {"count": 2},
}


def _register(kind: str, method: str) -> None:
    # A full or too small cache says so by its own name.
    @case(f"caches.{kind}.{method}", key="cache", value="cache", length="max_crop")
    def _() -> Call:
        cache = _held(MAKERS[kind]())
        return Call(getattr(cache, method), ARGUMENTS[method](), after=_next(cache))


for _kind in MAKERS:
    for _method in ARGUMENTS:
        _register(_kind, _method)


@case("caches.KVCache.update, rows that differ")
def _() -> Call:
    cache = _held(KVCache(B, KV, 9, D))
    cache.crop(torch.tensor([3, 5]))
    given = {
        "key": torch.randn(B, KV, 2, D),
        "value": torch.randn(B, KV, 2, D),
        "positions": torch.tensor([[3, 4], [5, 6]]),
    }
    return Call(cache.update, given, after=_next(cache))


case("caches.KVCache")(lambda: Call(KVCache, {**_sizes(), "max_length": 5}))
case("caches.SlidingKVCache")(lambda: Call(SlidingKVCache, {**_sizes(), "window": 5, "max_crop": 2}))
case("caches.EvictingKVCache")(lambda: Call(EvictingKVCache, {**_sizes(), "budget": 5, "policy": HeavyHitters()}))


def _sizes() -> dict[str, Any]:
    sizes = {"batch_size": B, "num_kv_heads": KV, "head_dim": D, "value_head_dim": 5}
    return {**sizes, "dtype": torch.float32, "device": "cpu"}


case("caches.HeavyHitters", weight=2)(lambda: Call(HeavyHitters, {"recent": 0.5}))
case("caches.SinksAndRecent", weight=2)(lambda: Call(SinksAndRecent, {"sinks": 2}))
case("caches.RandomEviction", weight=2)(lambda: Call(RandomEviction, {"seed": 2}))
case("caches.Held.among_last", weight=2)(
    lambda: Call(Held(torch.arange(4).expand(1, 1, 4), torch.zeros(1, 1, 4), 3).among_last, {"count": 2})
)


@once
def _decoder() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=7, **sizes)).eval()
    model.set_attn_implementation("clearhead")
    return model


def _cache_for(kind: str, arguments: dict[str, Any]) -> None:
    @case(f"integrations.transformers.cache_for, {kind}")
    def _() -> Call:
        return Call(cache_for, {"model": _decoder(), "kind": kind, **arguments})


_cache_for("full", {"max_length": 9})
_cache_for("sliding", {"window": 3})
_cache_for("heavy_hitters", {"budget": 5, "recent": 0.25})
_cache_for("sinks_and_recent", {"budget": 5, "sinks": 2})
