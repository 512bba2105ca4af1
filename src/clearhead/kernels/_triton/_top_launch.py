# pyright: basic, reportMissingImports=false
"""Statistics of rows with the k largest weights: `rows_kernel` also keeps the largest score of each group of keys."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ._launch import Launch, rows_launch
from ._operands import Operands
from ._tile import GROUP_KEYS as _GROUP_KEYS
from ._tiles import power_of_two, tiles_for, tiles_over
from ._top import RUN as _RUN
from ._top import best_kernel, groups_kernel

GROUP_KEYS, RUN = _GROUP_KEYS.value, _RUN.value  # of the kernels
_SCRATCH = 1 << 26  # largest scores at a time, 256 MB
_PER_WARP = 4096  # largest scores that `groups_kernel` holds
_TILE = 2048  # numbers of 16 bits of keys that `best_kernel` multiplies at a time


def rows_and_top(operands: Operands, count: int, want: Sequence[str], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics (n, B, H, L) of `want`, and the largest weights and their keys, (B, H, L, count) each.

    Args:
        operands, want: as for `rows_launch`. ``"lse"`` is in `want`.
        count: how many weights, at least 1.
        options: `sinks` and `first_keys` of `rows_launch`.
    """
    query = operands.query
    (batch, heads, length, _), groups = query.shape, tiles_over(operands.key.shape[2], GROUP_KEYS)
    shape = (batch, heads, length, count)
    results = query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.int64)
    out = query.new_empty((len(want), *shape[:3]), dtype=torch.float32)
    tiles = tiles_for("top", operands)
    at_once = max(1, _SCRATCH // (batch * heads * groups) // tiles.queries) * tiles.queries
    for row in range(0, length, at_once):
        rows = min(at_once, length - row)
        maxima = query.new_empty((batch, heads, rows, groups), dtype=torch.float32)
        launch = rows_launch(operands, want, **options, tiles=tiles, out=out, row=row, maxima=maxima)
        launch.run()
        (chosen,) = groups_launch(launch, maxima, min(count, groups)).run()
        best_launch(launch, chosen, out[want.index("lse")], results).run()
    return out, *results


def groups_launch(rows: Launch, maxima: Tensor, count: int) -> Launch:
    """A launch that finds the groups with the largest maxima. It writes their numbers (B, H, rows, count)."""
    groups = maxima.shape[3]
    chosen = maxima.new_empty((*maxima.shape[:3], count), dtype=torch.int32)
    runs, slots = power_of_two(tiles_over(groups, RUN)), power_of_two(count)
    of_row = max(runs, slots) * RUN
    at_once = max(1, min(4, 8 * _PER_WARP // of_row))
    arguments = _shared(groups_kernel, rows) | {
        "maxima": maxima, "chosen": chosen, "groups": groups, "chosen_count": count,
        "ROWS": at_once, "RUNS": runs, "SLOTS": slots, "num_warps": _warps(at_once * of_row, _PER_WARP),
    }  # fmt: skip
    programs = tiles_over(maxima.shape[2], at_once) * maxima.shape[:2].numel()
    return Launch(groups_kernel, programs, arguments, (chosen,))


def best_launch(rows: Launch, chosen: Tensor, lse: Tensor, results: tuple[Tensor, Tensor]) -> Launch:
    """A launch that writes the weights and keys (B, H, L, k) of the rows of another launch, from the chosen groups."""
    count, is_float = chosen.shape[3], rows.arguments["query"].dtype == torch.float32
    slots, wide = power_of_two(count), is_float and rows.arguments["BLOCK_D"] > 128
    arguments = _shared(best_kernel, rows) | {
        "lse": lse, "chosen": chosen, "weights_out": results[0], "keys_out": results[1],
        "wanted": results[0].shape[3], "chosen_count": count, "SLOTS": slots, "MATRIX": not is_float,
        "AT_ONCE": max(1, min(slots, _TILE // (2 if is_float else 1) // (GROUP_KEYS * rows.arguments["BLOCK_D"]))),
        "num_warps": max(4 if wide else 1, _warps(slots * GROUP_KEYS, _PER_WARP // 2)),
    }  # fmt: skip
    return Launch(best_kernel, chosen.shape[:3].numel(), arguments, results)


def _shared(kernel: Any, launch: Launch) -> dict[str, Any]:
    """The arguments of a launch that another kernel has too."""
    return {name: launch.arguments[name] for name in signature(kernel.fn).parameters if name in launch.arguments}


def _warps(numbers: int, of_one: int) -> int:
    return max(1, min(32, power_of_two(tiles_over(numbers, of_one))))
