"""Decoding step by step, and the expected result: one full causal pass over each row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import MultiHeadAttention, masks
from clearhead.caches import Cache, EvictingKVCache, HeavyHitters, KVCache, SinksAndRecent, SlidingKVCache
from clearhead.masks import Mask
from clearhead.positions import Rotary

B, EMBED, HEADS, KV_HEADS, DIM = 3, 11, 6, 3, 4
ROOM, MAX_CROP = 72, 4

#: The class, the size (the window, or more than is ever fed) and the options of each kind of cache.
CACHES: dict[str, tuple[Callable[..., Cache], int, dict[str, Any]]] = {
    "kv": (KVCache, ROOM, {}),
    "sliding": (SlidingKVCache, 5, {"max_crop": MAX_CROP}),
    "heavy hitters": (EvictingKVCache, ROOM, {"policy": HeavyHitters()}),
    "streaming": (EvictingKVCache, ROOM, {"policy": SinksAndRecent()}),
}
ALL_CACHES = {**CACHES, "sliding, itself alone": (SlidingKVCache, 1, dict[str, Any]())}


def make_cache(kind: str, batch: int = B, heads: int = KV_HEADS, dim: int = DIM, **options: Any) -> Cache:
    make, size, settings = ALL_CACHES[kind]
    return make(batch, heads, size, dim, dtype=torch.float64, **settings, **options)


def module(*, rotary: bool = True, dtype: torch.dtype = torch.float64, **options: Any) -> MultiHeadAttention:
    torch.manual_seed(5)
    parts = {"position": Rotary(DIM) if rotary else None, "k_norm": nn.RMSNorm(DIM, dtype=dtype), **options}
    return MultiHeadAttention(EMBED, HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, **parts).eval()


def rule(kind: str) -> Mask:
    """What the cache leaves visible, as a mask for the pass without one."""
    make, size, _ = ALL_CACHES[kind]
    return masks.causal() & masks.sliding_window(size - 1, 0) if make is SlidingKVCache else masks.causal()


@torch.no_grad()
def whole(attend: MultiHeadAttention, x: Tensor, kind: str) -> Tensor:
    return attend(x, mask=rule(kind))


@torch.no_grad()
def fed(attend: MultiHeadAttention, x: Tensor, cache: Cache, sizes: Sequence[int]) -> Tensor:
    """Feed `x` in chunks of these sizes."""
    parts = [attend(part, mask=masks.causal(), cache=cache) for part in x.split(list(sizes), 1)]
    return torch.cat(parts, 1)
