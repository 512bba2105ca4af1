"""The lowering of masks for FlexAttention, to blocks of queries and keys and a rule for partial blocks.

Numbers travel as tensors, so that one compiled kernel serves every mask of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks._base import Mask
from ..masks._grid import Block, Grid
from ..masks._lowering import chosen_cell
from ..masks._structure import Band, Structure, structure_of

#: Queries and keys in a block; PyTorch's own default.
SIDE = 128


@dataclass(frozen=True)
class Blocks:
    """Which blocks are computed, (1 or B, 1 or H, query blocks, key blocks), bool.

    Args:
        partial: blocks with visible and hidden cells, to which the rule applies.
        full: blocks without hidden cells.
        rule: tensors that the compiled rule reads. A band has ``ends``, int64 (3,): low, high and stop.
            On a CPU other masks have ``cells``, bool ((1 + number of partial blocks) · SIDE²,). Block 0 hides
            everything. ``places`` and ``place_steps`` are a `table` with the number of each partial block, from 1.
            On other devices they have ``visible`` and ``visible_steps``, a `table` of every cell, because the
            number of partial blocks would be read.
    """

    partial: Tensor
    full: Tensor
    rule: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """The rule, and the blocks of each row and of each column, by the names of `BlockMask`'s arguments."""
        named = dict(self.rule)
        for prefix, blocks in (("", self.partial), ("full_", self.full)):
            named[f"{prefix}kv_num_blocks"], named[f"{prefix}kv_indices"] = _ordered(blocks)
            named[f"{prefix}q_num_blocks"], named[f"{prefix}q_indices"] = _ordered(blocks.mT)
        return named


def table(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor that broadcasts to four dimensions, as its numbers (n,) and the distances between neighbours in each.

    These are int64 (4,), 0 along dimensions that broadcast.
    """
    tensor = tensor.contiguous()
    steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.flatten(), numbers_on(tensor.device, steps)


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Numbers as int64 (n,). They are written on the device, because a copy to it would wait."""
    return torch.cat([torch.full((1,), number, dtype=torch.long, device=device) for number in numbers])


def lower_tensors(mask: Mask | None, grid: Grid) -> dict[str, Tensor]:
    """The tensors of the blocks of a mask. A prepared mask is lowered once."""
    if mask is None:
        return lower_blocks(mask, grid).tensors()
    return mask.lowered(grid, "flex", lambda: lower_blocks(mask, grid).tensors())


def lower_blocks(mask: Mask | None, grid: Grid) -> Blocks:
    """The blocks of a mask, in memory that grows with L · S / SIDE² and the number of partial blocks.

    On other devices than a CPU it is L · S for masks that are no band, and no value is read.
    """
    if mask is None:
        return _band_blocks(Band.whole(grid), grid)
    structure = structure_of(mask, grid)
    band = structure.only_band(grid)
    if band is not None:
        return _band_blocks(band, grid)
    return _cell_blocks(mask, structure, grid) if grid.device.type == "cpu" else _dense_blocks(mask, grid)


def _band_blocks(band: Band, grid: Grid) -> Blocks:
    rows = torch.arange(0, grid.query_length, SIDE, device=grid.device)[:, None]  # first of each block, (n, 1)
    columns = torch.arange(0, grid.key_length, SIDE, device=grid.device)  # (m,)
    last_row = rows + SIDE - 1
    stop_column = columns + SIDE
    some = (columns <= last_row + band.high) & (columns < band.stop) & (stop_column > rows + band.low)
    some &= band.low <= band.high
    every = (columns >= last_row + band.low) & (stop_column <= rows + band.high + 1) & (stop_column <= band.stop)
    inside = (last_row < grid.query_length) & (stop_column <= grid.key_length)
    full = some & every & inside  # those at the edge hide what lies beyond it
    ends = numbers_on(grid.device, (band.low, band.high, band.stop))
    return Blocks((some & ~full)[None, None], full[None, None], {"ends": ends})


def _dense_blocks(mask: Mask, grid: Grid) -> Blocks:
    """Evaluate every cell at once."""
    visible = mask.visible(Block(grid))
    if visible is None:
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=grid.device)
    cells = visible.expand(*visible.shape[:2], grid.query_length, grid.key_length)
    blocks = F.pad(cells, (0, -grid.key_length % SIDE, 0, -grid.query_length % SIDE))
    blocks = blocks.unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE))  # (1 or B, 1 or H, n, SIDE, m, SIDE)
    full, some = blocks.all(-1).all(-2), blocks.any(-1).any(-2)
    flat, steps = table(visible)
    return Blocks(_for_all(some & ~full, grid), _for_all(full, grid), {"visible": flat, "visible_steps": steps})


def _for_all(blocks: Tensor, grid: Grid) -> Tensor:
    """Blocks of every item and head. All masks have one shape, so one compiled kernel serves them."""
    return blocks.expand(grid.batch_size, grid.num_heads, -1, -1)


def _cell_blocks(mask: Mask, structure: Structure, grid: Grid) -> Blocks:
    """Evaluate every block that the mask's structure leaves, one row of blocks at a time."""
    query_blocks, key_blocks = -(-grid.query_length // SIDE), -(-grid.key_length // SIDE)
    cell = mask.visible(chosen_cell(grid))
    outer = (1, 1) if cell is None else (cell.shape[0], cell.shape[1])
    partial = torch.zeros(*outer, query_blocks, key_blocks, dtype=torch.bool, device=grid.device)
    full, places = partial.clone(), torch.zeros(partial.shape, dtype=torch.long, device=grid.device)
    partial_cells = [torch.zeros(SIDE * SIDE, dtype=torch.bool, device=grid.device)]
    count = 1
    for row in range(query_blocks):
        first, cells = _strip(mask, structure, grid, row)
        columns = slice(first, first + cells.shape[2])
        flat = cells.expand(*outer, -1, -1, -1).flatten(-2)  # (1 or B, 1 or H, blocks, SIDE²)
        every = flat.all(-1)
        some = flat.any(-1) & ~every
        partial[:, :, row, columns], full[:, :, row, columns] = some, every
        partial_cells.append(flat[some].flatten())
        stop = count + int(some.sum())
        places[:, :, row, columns][some] = torch.arange(count, stop, device=grid.device)
        count = stop
    flat, steps = table(places)
    # PyTorch orders what a graph reads by these names, and of some orders its C++ does not compile.
    rule = {"places": flat, "place_steps": steps, "cells": torch.cat(partial_cells)}
    return Blocks(_for_all(partial, grid), _for_all(full, grid), rule)


def _strip(mask: Mask, structure: Structure, grid: Grid, row: int) -> tuple[int, Tensor]:
    """The first visible block of a row of blocks, and the row's cells (1 or B, 1 or H, blocks, SIDE, SIDE)."""
    rows = slice(row * SIDE, min((row + 1) * SIDE, grid.query_length))
    start, stop = structure.columns(grid, rows)
    first, last = start // SIDE, -(-stop // SIDE)
    columns = slice(first * SIDE, min(last * SIDE, grid.key_length))
    block = Block(grid, rows=rows, columns=columns)
    visible = mask.visible(block) if first < last else None
    shape = (rows.stop - rows.start, max(0, columns.stop - columns.start))
    if visible is None:
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=grid.device)
    visible = visible.expand(*visible.shape[:2], *shape)
    padded = F.pad(visible, (0, max(0, last - first) * SIDE - shape[1], 0, SIDE - shape[0]))
    return first, padded.unflatten(-1, (-1, SIDE)).transpose(-3, -2)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The count of marked blocks in each row, and all block numbers with the marked ones first."""
    numbers = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).contiguous(), numbers.to(torch.int32).contiguous()
