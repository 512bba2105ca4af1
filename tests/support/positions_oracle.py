"""Rotary embeddings written a second time, in complex float64, and the tensors that they rotate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 10, 5, 22


def states(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """q (B, H, L, D) and k (B, Hkv, L, D)."""
    q = torch.randn(BATCH, HEADS, length, HEAD_DIM, dtype=dtype)
    return q, torch.randn(BATCH, KV_HEADS, length, HEAD_DIM, dtype=dtype)


def frequencies(base: float, size: int) -> list[float]:
    """Radians per position of each pair, unscaled."""
    return [math.exp(-2 * i / size * math.log(base)) for i in range(size // 2)]


def turn(x: Tensor, positions: Tensor, frequencies: list[float], *, interleaved: bool = False) -> Tensor:
    """Turn x (B, H, L, D) at positions (B, L) as complex numbers; features beyond the pairs stay."""
    size = 2 * len(frequencies)
    turned, rest = x[..., :size].double(), x[..., size:].double()
    if interleaved:
        pairs = torch.complex(turned[..., 0::2], turned[..., 1::2])
    else:
        pairs = torch.complex(turned[..., : size // 2], turned[..., size // 2 :])
    angles = positions.clamp(min=0).double()[:, None, :, None] * torch.tensor(frequencies, dtype=torch.float64)
    pairs = pairs * torch.exp(1j * angles)
    parts = torch.view_as_real(pairs).flatten(-2) if interleaved else torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((parts, rest), -1)
