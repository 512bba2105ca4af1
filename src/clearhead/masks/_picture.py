"""A small picture of a mask for `repr`: some rows and columns, never all of L × S."""

from __future__ import annotations

import torch

from ._base import Mask
from ._check import grid_for
from ._grid import Block, Grid

_SIDE = 12  # at most this many rows and columns are drawn
_LENGTH = 8  # the drawn length of a mask that fits any length


def draw(mask: Mask) -> str:
    """Describe the mask and draw batch item 0, head 0: ``■`` visible, ``·`` hidden."""
    try:
        sizes = mask.sizes()
        grid = grid_for(mask, sizes.query_length or sizes.key_length or sizes.fewest_keys or _LENGTH)
        mask.validate(grid)
        picture, note = _sample(mask, grid)
    except Exception as error:  # a repr is read while debugging, so it must not raise
        return f"<mask {mask.describe()}: cannot be drawn, {error}>"
    return "\n".join([f"<mask {mask.describe()}{note}", *picture, ">"])


def _sample(mask: Mask, grid: Grid) -> tuple[list[str], str]:
    rows, columns = _spread(grid.query_length, grid.device), _spread(grid.key_length, grid.device)
    block = Block(grid, batch=slice(0, 1), heads=slice(0, 1), rows=rows, columns=columns)
    shape = (1, 1, len(rows), len(columns))
    visible = mask.visible(block)
    # One head of one item, so the picture stays small.
    shown = torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape)
    lines = ["  " + "".join("■" if mark else "·" for mark in row) for row in shown[0, 0].tolist()]
    notes: list[str] = []
    if grid.batch_size > 1 or grid.num_heads > 1:
        notes.append(f"item 0 of {grid.batch_size}, head 0 of {grid.num_heads}")
    if len(rows) < grid.query_length or len(columns) < grid.key_length:
        notes.append(f"{len(rows)} of {grid.query_length} queries × {len(columns)} of {grid.key_length} keys")
    return lines, "".join(f", {note}" for note in notes)


def _spread(length: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, length - 1, min(length, _SIDE), device=device).round().long()
