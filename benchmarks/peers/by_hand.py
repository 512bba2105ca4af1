"""Attention as a course writes it: four `Linear` and SDPA, and for decoding two preallocated buffers."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead

__all__ = ["ByHand", "ByHandCache"]


@final
class ByHandCache:
    """Buffers for the keys and values of `max_length` tokens, and how many they hold."""

    def __init__(self, batch: int, heads: int, max_length: int, head_dim: int) -> None:
        self.key = torch.empty(batch, heads, max_length, head_dim)
        self.value = torch.empty(batch, heads, max_length, head_dim)
        self.length = 0


@final
class ByHand(nn.Module):
    """Self-attention with the weights of a Clearhead module."""

    def __init__(self, ours: clearhead.MultiHeadAttention) -> None:
        super().__init__()
        size = ours.out_proj.out_features
        self.heads = ours.num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(size, size) for _ in range(4))
        pairs = zip(self.children(), (ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj), strict=True)
        for linear, projection in pairs:
            linear.load_state_dict(projection.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(project(x)) for project in (self.query, self.key, self.value))
        return self._joined(F.scaled_dot_product_attention(query, key, value))

    def step(self, token: Tensor, cache: ByHandCache) -> Tensor:
        """One token (B, 1, E) after those in the cache."""
        at = cache.length
        cache.length = end = at + 1
        cache.key[:, :, at:end] = self._split(self.key(token))
        cache.value[:, :, at:end] = self._split(self.value(token))
        query = self._split(self.query(token))
        return self._joined(F.scaled_dot_product_attention(query, cache.key[:, :, :end], cache.value[:, :, :end]))

    def _split(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        return x.view(batch, length, self.heads, size // self.heads).transpose(1, 2)  # (B, H, L, D)

    def _joined(self, heads: Tensor) -> Tensor:
        return self.out(heads.transpose(1, 2).flatten(2))  # (B, L, E)
