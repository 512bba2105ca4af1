"""What `masks.selected` means, alone, combined, cut to parts, prepared and drawn; its coverage."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.masks._bound import bind
from clearhead.masks._coverage import coverage
from clearhead.masks._grid import Block, Grid, Offset
from clearhead.masks._part import part_of
from clearhead.positions import ALiBi

B, H, L, S = 2, 6, 5, 11
CPU = torch.device("cpu")


def drawn(*shape: int, below: int = S, seed: int = 0) -> Tensor:
    return torch.randint(-1, below, shape, generator=torch.Generator().manual_seed(seed))


def by_hand(indices: Tensor, block: int = 1) -> Tensor:
    """Cell by cell, (B, H, L, S)."""
    lists = (indices[:, None] if indices.dim() == 3 else indices).expand(B, -1, -1, -1).tolist()
    found = torch.zeros(B, H, L, S, dtype=torch.bool)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        found[b, h, i, j] = j // block in lists[b][h * len(lists[b]) // H][i]
    return found


LISTS: dict[str, tuple[Tensor, int]] = {
    "items": (drawn(B, L, 4), 1),
    "one item": (drawn(1, L, 4).int(), 1),
    "one head": (drawn(B, 1, L, 4), 1),
    "key heads": (drawn(1, 2, L, 4), 1),
    "query heads": (drawn(B, H, L, 3).int(), 1),
    "blocks": (drawn(B, L, 2, below=4), 3),
    "one block": (drawn(B, L, 2, below=1), 64),
    "none": (drawn(B, L, 0), 1),
}


@pytest.mark.parametrize("name", LISTS)
def test_every_cell(name: str) -> None:
    indices, block = LISTS[name]
    mask, expected = masks.selected(indices, block=block), by_hand(indices, block)
    sizes: dict[str, Any] = {"batch_size": B, "num_heads": H}
    assert torch.equal(mask.dense(L, S, **sizes), expected)
    assert torch.equal((~mask).dense(L, S, **sizes), ~expected)
    assert torch.equal((mask | masks.prefix(2)).dense(L, S, **sizes), expected | (torch.arange(S) < 2))
    assert torch.equal((masks.causal() & mask).dense(L, S, **sizes), expected & torch.ones(L, S).tril().bool())
    grid = Grid(B, H, L, S, CPU)
    rows, columns = torch.tensor([4, 0, 2]), torch.tensor([10, 1])
    shown = mask.visible(Block(grid, slice(1, 2), slice(2, 5), rows, columns))
    assert torch.equal(shown.expand(1, 3, 3, 2), expected[1:2, 2:5][:, :, rows][..., columns])
    cut = mask.visible(Block(grid, rows=slice(1, 4), columns=slice(3, 9)))
    assert torch.equal(cut.expand(B, H, 3, 6), expected[:, :, 1:4, 3:9])


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("others", [None, masks.lengths(torch.tensor([4, S])), masks.causal("bottom_right"), ALiBi(H)])
def test_coverage_is_that_of_the_cells(name: str, others: masks.Mask | None) -> None:
    indices, block = LISTS[name]
    mask = masks.selected(indices, block=block)
    mask = mask if others is None else others & mask
    cells = mask.dense(L, S, batch_size=B, num_heads=H)
    cells = cells > float("-inf") if cells.is_floating_point() else cells
    found = coverage(bind(mask, Grid(B, H, L, S, CPU)))
    for marks, expected in ((found.queries, cells.any(-1)), (found.keys, cells.any(-2))):
        shown = torch.ones_like(expected) if marks is None else marks[..., 0].expand(expected.shape)
        assert torch.equal(shown, expected)


def test_positions_change_nothing() -> None:
    mask = masks.selected(drawn(B, L, 4))
    moved = mask.dense(L, S, query_positions=7, key_positions=torch.arange(S) * 3)
    assert torch.equal(moved, mask.dense(L, S))


def test_a_part_of_a_larger_call() -> None:
    for indices, block in LISTS.values():
        mask = masks.selected(indices, block=block)
        whole = mask.dense(L, S, batch_size=B, num_heads=H)
        for columns in (None, range(1, 10, 2), torch.tensor([2, 7, 8])):
            part = part_of(bind(mask, Grid(B, H, L, S, CPU)), Offset(H, 2, 1, 3), columns)
            count = 5 if columns is None else len(columns)
            shown = part.dense(3, count, batch_size=B, num_heads=3)
            chosen = torch.arange(3, 8) if columns is None else torch.tensor(list(columns))
            assert torch.equal(shown, whole[:, 2:5, 1:4][..., chosen])


def test_a_prepared_mask_is_a_snapshot() -> None:
    indices = drawn(B, L, 4)
    mask = masks.selected(indices)
    prepared, before = mask.prepare(L, S, num_heads=H), mask.dense(L, S)
    indices.fill_(0)
    assert torch.equal(prepared.dense(L, S, num_heads=H), before.expand(-1, H, -1, -1))
    assert torch.equal(pickle.loads(pickle.dumps(mask)).dense(L, S), mask.dense(L, S))
    with pytest.raises(clearhead.errors.ArgumentError, match=r"numbers from 0 to 10 of the 11 keys, .*got 11\."):
        masks.selected(drawn(B, L, 4).clamp(max=0) + 11).prepare(L, S)


def test_it_is_drawn_and_checked() -> None:
    mask = masks.selected(torch.tensor([[[0, -1], [0, 1], [2, 2]]]))
    assert repr(mask).split("\n") == ["<mask selected((1, 3, 2))", "  ■··", "  ■■·", "  ··■", ">"]
    assert masks.selected(torch.tensor([[[1]]]), block=4).describe() == "selected((1, 1, 1), block=4)"
    report = masks.selected(torch.tensor([[[0], [-1]]])).check(2, 3)
    assert [finding.partition(":")[0] for finding in report.findings] == [
        "queries that see no key",
        "keys that no query sees",
    ]
    assert "shape or value" in masks.selected(torch.tensor([[[9]]])).check(1, 3).findings[0]


def test_missing_sizes_come_from_the_lists() -> None:
    assert masks.selected(torch.tensor([[[6], [2]]])).dense().shape == (1, 1, 2, 7)
    assert masks.selected(drawn(3, 4, 2, 1)).dense(key_length=S).shape == (3, 4, 2, S)
