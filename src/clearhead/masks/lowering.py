"""From the description of a mask to what a kernel takes; the only place where masks become tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tracing import is_tracing
from .base import Mask
from .grid import ALL, Block, Grid
from .positional import Causal

__all__ = ["Reach", "dense_mask", "is_plain_causal", "reach"]

_ROWS_AT_A_TIME = 1 << 21  # elements of mask evaluated at once when looking for hidden rows and columns


@dataclass(frozen=True)
class Reach:
    """Which queries see any key, and which keys any query sees; ``None`` where all do.

    Args:
        queries: bool (1 or B, 1 or H, L, 1).
        keys: bool (1 or B, 1 or H, S, 1).
    """

    queries: Tensor | None
    keys: Tensor | None


def is_plain_causal(mask: Mask | None, grid: Grid) -> bool:
    """True if the mask says exactly j ≤ i, which fused kernels know as a flag."""
    return isinstance(mask, Causal) and mask.diagonal(grid) == 0


def dense_mask(mask: Mask, grid: Grid) -> Tensor:
    """The whole mask, (B, H, L, S): bool, or float with −inf for hidden keys if there is a bias."""
    shape = (grid.batch_size, grid.num_heads, grid.query_length, grid.key_length)
    block = Block(grid)
    visible = mask.visible(block)
    dtype = torch.float32
    for tensor in mask.bias_tensors():
        dtype = torch.promote_types(dtype, tensor.dtype)
    bias = mask.bias(block, dtype)
    if bias is None:
        if visible is None:
            return torch.ones(shape, dtype=torch.bool, device=grid.device)
        return visible.expand(shape)
    return (bias if visible is None else bias.masked_fill(~visible, float("-inf"))).expand(shape)


def reach(mask: Mask, grid: Grid) -> Reach:
    """Find the queries that see nothing and the keys that nobody sees, in blocks of rows."""
    if is_plain_causal(mask, grid):
        if grid.query_length >= grid.key_length:
            return Reach(None, None)
        return Reach(None, (torch.arange(grid.key_length, device=grid.device) < grid.query_length)[None, None, :, None])
    queries: list[Tensor] = []
    keys: Tensor | None = None
    for rows in _row_slices(mask, grid):
        visible = mask.visible(Block(grid, rows=rows))
        if visible is None:
            return Reach(None, None)
        some_keys = visible.any(-2)
        keys = some_keys if keys is None else keys | some_keys
        some_queries = visible.any(-1)
        if rows != ALL:
            some_queries = some_queries.expand(*some_queries.shape[:-1], rows.stop - rows.start)
        queries.append(some_queries)
    if keys is None:
        return Reach(None, None)
    seeing = queries[0] if len(queries) == 1 else torch.cat(queries, -1)
    if seeing.shape[-1] != grid.query_length:
        seeing = seeing.expand(*seeing.shape[:-1], grid.query_length)
    if keys.shape[-1] != grid.key_length:
        keys = keys.expand(*keys.shape[:-1], grid.key_length)
    return Reach(seeing[..., None], keys[..., None])


def _row_slices(mask: Mask, grid: Grid) -> list[slice]:
    if is_tracing() or grid.query_length == 0 or grid.key_length == 0:
        return [ALL]
    corner = mask.visible(Block(grid, rows=slice(0, 1), columns=slice(0, 1)))  # shows which sizes broadcast
    per_row = grid.key_length * (1 if corner is None else max(1, corner.numel()))
    step = max(1, _ROWS_AT_A_TIME // per_row)
    if step >= grid.query_length:
        return [ALL]
    return [slice(start, min(start + step, grid.query_length)) for start in range(0, grid.query_length, step)]
