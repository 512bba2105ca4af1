"""Strides of the tensors that PyTorch's kernels return, which graphs of its compiler rely on."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..kernels._native_arguments import Strides


@lru_cache(256)
def strides_like(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Those of `torch.empty_like`: of the output."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


@lru_cache(256)
def heads_inside(shape: tuple[int, ...]) -> Strides:
    """Those of a contiguous (B, L, H, D) tensor: of gradients (B, H, L, D)."""
    return torch.empty_permuted(shape, (0, 2, 1, 3), device="meta").stride()
