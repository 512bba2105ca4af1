# pyright: basic, reportMissingImports=false
"""The k largest weights in two steps: the k best tiles of each row, then the k best keys of those tiles."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ._launch import Launch, Tiles, arguments_of
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
    (batch, heads, length, dim), count = query.shape, key.shape[2]
    shape = (batch, heads, length, k)
    weights, keys = query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.int64)
    if weights.numel() == 0:
        return weights, keys
    tiles = triton.cdiv(count, TILE)
    wide = dim > 128 or query.dtype == torch.float32
    arguments = arguments_of(query, key, terms, scale, softcap, Tiles(16 if wide else 64, TILE, 4, 1 if wide else 2))
    chosen = min(k, tiles)
    rows = max(1, min(length, _SCRATCH // (batch * heads * max(tiles, chosen * TILE))))
    largest = query.new_full((batch, heads, tiles, length), float("-inf"), dtype=torch.float32)
    programs = triton.cdiv(length, arguments["M"]) * batch * heads
    Launch(largest_kernel, programs, arguments | {"out": largest}, (largest,)).run()
    for row in range(0, length, rows):
        some = slice(row, min(length, row + rows))
        packed = _packed(arguments, largest[..., some], row, chosen)
        best = packed.topk(min(k, packed.shape[-1])).values
        weights[:, :, some], keys[:, :, some] = _unpacked(best, lse[:, :, some])
    return weights, keys


def _packed(arguments: dict[str, Any], largest: Tensor, row: int, chosen: int) -> Tensor:
    """The packed scores of the best tiles of some rows, (B, H, rows, chosen · TILE)."""
    best = largest.transpose(2, 3).sort(dim=-1, descending=True, stable=True).indices[..., :chosen].contiguous()
    out = best.new_empty((*best.shape, TILE))
    own = {"chosen": best, "out": out, "row": row, "count": best.shape[2], "chosen_count": chosen}
    Launch(chosen_kernel, best.numel(), arguments | own, (out,)).run()
    return out.flatten(3)


def _unpacked(packed: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and keys from packed scores (B, H, rows, k) in units of log2."""
    order = (packed >> 32).int()
    scores = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32) * math.log(2)
    hidden = scores == float("-inf")
    weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0)
    return weights, (0x7FFFFFFF - (packed & 0xFFFFFFFF)).masked_fill(hidden, -1)
