"""What FlexAttention is told about a mask: the blocks that are computed, and the rule inside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from clearhead.kernels import _flex_blocks as flex_blocks
from clearhead.kernels._flex_blocks import Blocks, lower_blocks, table
from clearhead.masks import Mask
from clearhead.masks._grid import Grid
from clearhead.masks._lowering import dense_mask
from tests.masks.test_lowering import cases

CPU = torch.device("cpu")
B, H = 2, 3


def rule(blocks: Blocks, grid: Grid, side: int) -> Tensor:
    """What the rule says of every cell, (1 or B, 1 or H, L, S), read as the compiled kernel reads it."""
    i = torch.arange(grid.query_length)[:, None]
    j = torch.arange(grid.key_length)
    if "ends" in blocks.rule:
        low, high, stop = blocks.rule["ends"]
        return ((j >= i + low) & (j <= i + high) & (j < stop))[None, None]
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    places, steps = blocks.rule["places"], blocks.rule["place_steps"]
    place = places[b * steps[0] + h * steps[1] + i // side * steps[2] + j // side * steps[3]]
    return blocks.rule["cells"][(place * side + i % side) * side + j % side]


def spread(blocks: Tensor, grid: Grid, side: int) -> Tensor:
    """Every block's mark on all its cells."""
    cells = blocks.repeat_interleave(side, -2).repeat_interleave(side, -1)
    return cells[..., : grid.query_length, : grid.key_length]


@pytest.mark.parametrize("side", [1, 2, 3, 5, 16])
def test_blocks_and_rule_say_what_the_mask_says(side: int) -> None:
    @given(cases())
    def compare(case: tuple[Mask, Grid]) -> None:
        mask, grid = case
        dense = dense_mask(mask, grid)
        visible = dense if dense.dtype == torch.bool else dense != -torch.inf
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex_blocks, "SIDE", side)
            blocks = lower_blocks(mask, grid)
        cells = cells_of_blocks(visible, side)
        seen, full = cells.any(-1), cells.all(-1)
        assert torch.equal(blocks.partial.expand_as(seen), seen & ~full), "a block that shows nothing is computed"
        assert torch.equal(blocks.full.expand_as(full), full), "a whole block asks the rule"
        partial = spread(blocks.partial, grid, side) & rule(blocks, grid, side)
        assert torch.equal((spread(blocks.full, grid, side) | partial).expand_as(visible), visible)

    compare()


def cells_of_blocks(visible: Tensor, side: int) -> Tensor:
    """The cells of each block, hidden beyond the edges, as many as the mask tells apart."""
    rows, columns = -visible.shape[-2] % side, -visible.shape[-1] % side
    padded = torch.nn.functional.pad(visible, (0, columns, 0, rows))
    return padded.unflatten(-1, (-1, side)).unflatten(-3, (-1, side)).transpose(-3, -2).flatten(-2)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 1, 7), (2, 1, 5, 1), (1, 1, 1, 1)], ids=str)
def test_a_table_broadcasts(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
    flat, s = table(tensor)
    b, h, i, j = torch.meshgrid(*(torch.arange(size) for size in (2, 3, 5, 7)), indexing="ij")
    assert torch.equal(flat[b * s[0] + h * s[1] + i * s[2] + j * s[3]], tensor.expand(2, 3, 5, 7))
