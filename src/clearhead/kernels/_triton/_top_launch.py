# pyright: basic, reportMissingImports=false
"""The k largest weights in two steps: the k best tiles of each row, then the k best keys of those tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._launch import Launch, Tiles, arguments_of, tiles_over
from ._terms import Terms
from ._top import chosen_kernel, largest_kernel

TILE = 128  # keys
_SCRATCH = 1 << 25  # packed scores at a time


def top_k_by_kernels(
    query: Tensor, key: Tensor, lse: Tensor, terms: Terms, k: int, *, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of keys, (B, H, L, k) each.

    The k largest lie in the k tiles with the largest maxima: each of those tiles has a score that goes before any
    score of another tile.
    """
    (batch, heads, length, _), count = query.shape, key.shape[2]
    shape = (batch, heads, length, k)
    weights, keys = query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.int64)
    if weights.numel() == 0:
        return weights, keys
    tiles = tiles_over(count, TILE)
    chosen = min(k, tiles)
    rows = max(1, min(length, _SCRATCH // (batch * heads * max(tiles, chosen * TILE))))
    first = largest_launch(query, key, terms, scale, softcap)
    largest = first.run()[0].transpose(2, 3)  # (B, H, L, tiles)
    for row in range(0, length, rows):
        some = slice(row, min(length, row + rows))
        # Stable, so that of equal tiles the first goes first.
        best_tiles = largest[:, :, some].sort(dim=-1, descending=True, stable=True).indices[..., :chosen].contiguous()
        packed = chosen_launch(first, best_tiles, row).run()[0].flatten(3)  # (B, H, rows, chosen · TILE)
        best = packed.topk(min(k, packed.shape[-1])).values
        weights[:, :, some], keys[:, :, some] = _unpacked(best, lse[:, :, some])
    return weights, keys


def largest_launch(query: Tensor, key: Tensor, terms: Terms, scale: float, softcap: float) -> Launch:
    """Of the largest score of each tile, (B, H, tiles, L)."""
    (batch, heads, length, dim), count = query.shape, key.shape[2]
    single = query.dtype == torch.float32
    tiles = Tiles(16 if single or dim > 128 else 64, TILE, 8 if single else 4, 1 if single or dim > 128 else 2)
    arguments = arguments_of(query, key, terms, scale, softcap, tiles)
    shape = (batch, heads, tiles_over(count, TILE), length)
    largest = query.new_full(shape, float("-inf"), dtype=torch.float32)
    programs = tiles_over(length, tiles.queries) * batch * heads
    return Launch(largest_kernel, programs, arguments | {"out": largest}, (largest,))


def chosen_launch(first: Launch, tiles: Tensor, row: int) -> Launch:
    """Of the packed scores of the best tiles (B, H, rows, n) of the rows from `row`: int64 (B, H, rows, n, TILE)."""
    out = tiles.new_empty((*tiles.shape, TILE))
    own = {"chosen": tiles, "out": out, "row": row, "count": tiles.shape[2], "chosen_count": tiles.shape[3]}
    return Launch(chosen_kernel, tiles.numel(), first.arguments | own | {"num_warps": 4}, (out,))


def _unpacked(packed: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and keys from packed scores (B, H, rows, k) in units of log2."""
    order = (packed >> 32).int()
    scores = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32) * math.log(2)
    hidden = scores == float("-inf")
    weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0)
    return weights, (0x7FFFFFFF - (packed & 0xFFFFFFFF)).masked_fill(hidden, -1)
