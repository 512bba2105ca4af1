"""Decoding step by step, and the expected result: one full causal pass over each row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from clearhead import MultiHeadAttention, masks
from clearhead.caches import Cache, EvictingKVCache, HeavyHitters, KVCache, SinksAndRecent, SlidingKVCache
from clearhead.masks import Mask

EMBED, HEADS, KV_HEADS, DIM = 11, 6, 3, 4
WINDOW = 5

MakeCache = Callable[[int, torch.dtype], Cache]


class Turn(nn.Module):
    """A rotary part in two lines: complex numbers turned by their position."""

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        return self._turned(q, positions), self._turned(k, positions)

    def _turned(self, x: Tensor, positions: Tensor | int) -> Tensor:
        if not isinstance(positions, Tensor):
            positions = torch.arange(positions, positions + x.shape[2])
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        speeds = 0.7 ** torch.arange(pairs.shape[-1]).double()
        angles = positions.clamp(min=0).double()[..., None] * speeds  # (L, D/2) or (B, L, D/2)
        angles = angles if angles.dim() == 2 else angles[:, None]
        return torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(-2).to(x.dtype)


def module(*, rotary: bool = True, dtype: torch.dtype = torch.float64) -> MultiHeadAttention:
    torch.manual_seed(5)
    parts = {"position": Turn() if rotary else None, "k_norm": nn.RMSNorm(DIM, dtype=dtype)}
    return MultiHeadAttention(EMBED, HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, **parts).eval()


CACHES: dict[str, MakeCache] = {
    "kv": lambda batch, dtype: KVCache(batch, KV_HEADS, 40, DIM, dtype=dtype),
    "sliding": lambda batch, dtype: SlidingKVCache(batch, KV_HEADS, WINDOW, DIM, max_crop=4, dtype=dtype),
    "heavy hitters": lambda batch, dtype: EvictingKVCache(batch, KV_HEADS, 40, DIM, policy=HeavyHitters(), dtype=dtype),
    "streaming": lambda batch, dtype: EvictingKVCache(batch, KV_HEADS, 40, DIM, policy=SinksAndRecent(), dtype=dtype),
}


def rule(kind: str) -> Mask:
    """What the cache leaves visible, as a mask for the pass without one."""
    return masks.causal() & masks.sliding_window(WINDOW - 1, 0) if kind == "sliding" else masks.causal()


@torch.no_grad()
def whole(attend: MultiHeadAttention, x: Tensor, kind: str) -> Tensor:
    return attend(x, mask=rule(kind))


@torch.no_grad()
def fed(attend: MultiHeadAttention, x: Tensor, cache: Cache, sizes: Sequence[int]) -> Tensor:
    """Feed `x` in chunks of these sizes."""
    parts = [attend(part, mask=masks.causal(), cache=cache) for part in x.split(list(sizes), 1)]
    return torch.cat(parts, 1)
