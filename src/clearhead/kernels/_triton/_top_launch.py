# pyright: basic, reportMissingImports=false
"""The k largest weights in two steps: the largest score of each group of keys, then the keys of the k best groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import Launch, arguments_of
from ._terms import Terms
from ._tiles import Tiles, power_of_two, tiles_for, tiles_over
from ._top import best_kernel, largest_kernel

GROUP_KEYS = 16
_SCRATCH = 1 << 26  # largest scores at a time, 256 MB
_PROGRAMS = 1024  # that fill a device
_PER_WARP = 1024  # groups


def top_k_by_kernels(
    query: Tensor, key: Tensor, lse: Tensor, terms: Terms, k: int, *, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of keys, (B, H, L, k) each.

    The k largest lie in the k groups with the largest maxima: each of those groups has a score that goes before any
    score of another group.
    """
    (batch, heads, length, _), count = query.shape, key.shape[2]
    shape = (batch, heads, length, k)
    results = query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.int64)
    if results[0].numel() == 0:
        return results
    lse = lse.contiguous()
    tiles = tiles_for("largest", query, terms, softcap)
    rows = _SCRATCH // (batch * heads * tiles_over(count, GROUP_KEYS))
    rows = max(1, rows // tiles.queries) * tiles.queries
    for row in range(0, length, rows):
        largest = largest_launch(query, key, terms, scale, softcap, row, min(rows, length - row), tiles)
        largest.run()
        best_launch(largest, lse, results).run()
    return results


def largest_launch(
    query: Tensor, key: Tensor, terms: Terms, scale: float, softcap: float, row: int, count: int, tiles: Tiles
) -> Launch:
    """Of the largest score of each group of keys, for the rows row … row + count: (B, H, count, groups)."""
    batch, heads = query.shape[:2]
    groups = tiles_over(key.shape[2], GROUP_KEYS)
    largest = query.new_empty((batch, heads, count, groups), dtype=torch.float32)
    programs = tiles_over(count, tiles.queries) * batch * heads
    splits = max(1, min(_PROGRAMS // programs, tiles_over(key.shape[2], 8 * tiles.keys)))
    own = {"out": largest, "row": row, "count": count, "groups": groups, "splits": splits}
    arguments = arguments_of(query, key, terms, scale, softcap, tiles) | own
    return Launch(largest_kernel, programs * splits, arguments, (largest,))


def best_launch(largest: Launch, lse: Tensor, results: tuple[Tensor, Tensor]) -> Launch:
    """Of the weights and keys (B, H, L, k), written to those of the rows of a launch of the largest scores."""
    (maxima,), k = largest.results, results[0].shape[3]
    groups = maxima.shape[3]
    chosen = min(k, groups)
    block, slots = max(_PER_WARP, power_of_two(groups)), power_of_two(chosen)
    arguments = dict(largest.arguments)
    del arguments["out"], arguments["splits"]
    wide = 2 if arguments["BLOCK_D"] > 128 else 1
    arguments |= {
        "lse": lse, "largest": maxima, "weights_out": results[0], "keys_out": results[1],
        "wanted": k, "chosen_count": chosen, "BLOCK_GROUPS": block, "SLOTS": slots,
        "num_warps": min(32, max(wide, block // _PER_WARP, slots * GROUP_KEYS // _PER_WARP)),
    }  # fmt: skip
    return Launch(best_kernel, maxima.shape[:3].numel(), arguments, results)
