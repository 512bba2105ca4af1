"""The mask of blocks of positions, each of which sees itself and the blocks before it."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from .._checks import integer
from ._base import Mask
from ._grid import Block, Grid
from ._positional import FAR, Rule
from ._structure import RowRanges, Structure, unknown_at


def block_causal(size: int) -> Mask:
    """Let each query attend to the blocks up to its own: key j is visible to query i if ⌊j / size⌋ ≤ ⌊i / size⌋.

    Within a block every position sees every other, as when a block diffusion model fills in a whole block at once.
    Blocks count from position 0, with a cache too. ``block_causal(1)`` is `causal`.

    Args:
        size: positions of a block, ≥ 1.

    Raises:
        ArgumentError: for a number below 1.
        DTypeError: for anything but an int.

    Example:
        >>> block_causal(2).dense(5)[0, 0].int()
        tensor([[1, 1, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    integer("size", size, least=1, most=math.inf)
    return BlockCausal(min(size, FAR))


@final
class BlockCausal(Rule):
    """See `block_causal`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def visible(self, block: Block) -> Tensor:
        return block.k < self._stop(block.q)

    def structure(self, grid: Grid) -> Structure:
        shift = grid.shift
        if shift is None:
            return unknown_at(grid)
        first = int(grid.key_positions or 0)
        rows = torch.arange(grid.query_length, device=grid.device)[None] + (shift + first)
        # Position 0 is visible to every query.
        return Structure(rows=RowRanges(None, self._stop(rows) - first, int(first == 0)), diagonal=shift >= 0)

    def describe(self) -> str:
        return f"block_causal({self.size})"

    def _stop(self, positions: Tensor) -> Tensor:
        """One past the last position of the block of each position."""
        return (positions.div(self.size, rounding_mode="floor") + 1) * self.size
