"""A mask by the recipe of docs/extending.md: kernels use its structure and signature, and need nothing else."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from clearhead.masks._structure import Band, Structure
from tests.support.requests import Block, Grid

L, S = 300, 300


@final
class Every(Mask):
    """As in docs/extending.md, with nothing but what has to be there."""

    def __init__(self, step: int) -> None:
        self._step = step

    def visible(self, block: Block) -> Tensor:
        return (block.q - block.k) % self._step == 0

    def describe(self) -> str:
        return f"every({self._step})"


@final
class Near(Mask):
    """Says that it is a band, and counts its structures and the cells that it is asked for."""

    def __init__(self, distance: int) -> None:
        self._distance = distance
        self.cells = self.structures = 0

    def visible(self, block: Block) -> Tensor:
        seen = (block.q - block.k).abs() < self._distance
        self.cells += seen.numel()
        return seen

    def structure(self, grid: Grid) -> Structure:
        self.structures += 1
        if grid.shift is None:
            return Structure(exact=False)
        ends = Band(grid.shift - self._distance + 1, grid.shift + self._distance - 1, grid.key_length)
        return Structure(band=Band.whole(grid).meet(ends))

    def signature(self) -> Hashable:
        return "near", self._distance

    def describe(self) -> str:
        return f"near({self._distance})"


@pytest.mark.parametrize("kernel", [None, "chunked", "reference"])
def test_the_recipe_alone_works(kernel: str | None) -> None:
    query, key = torch.randn(1, 2, 17, 4), torch.randn(1, 2, 23, 4)
    for mask in (Every(3), Every(3) & masks.causal(), Every(3) | masks.causal(), ~Every(3)):
        expected = clearhead.attention(query, key, key, masks.keep(mask.dense(17, 23)))
        with clearhead.use_kernel(kernel) if kernel else torch.no_grad():
            assert torch.allclose(clearhead.attention(query, key, key, mask), expected, atol=1e-5)
    assert Every(3).signature() is None


def test_a_structure_of_its_own_skips_blocks() -> None:
    query, key = torch.randn(1, 1, L, 4), torch.randn(1, 1, S, 4)
    near = Near(5)
    expected = clearhead.attention(query, key, key, masks.sliding_window(4, 4))
    with pytest.MonkeyPatch.context() as patch, clearhead.use_kernel("chunked"):
        patch.setattr("clearhead.kernels._blocks.BLOCK_ELEMENTS", 2000)
        assert torch.allclose(clearhead.attention(query, key, key, near), expected, atol=1e-5)
    assert 0 < near.cells < L * S / 4
    if not clearhead.explain(query, key, key, near).reasons["native"]:
        near.cells = 0
        assert torch.allclose(clearhead.attention(query, key, key, near), expected, atol=1e-5)
        assert near.cells == 0


def test_packed_sequences_share_one_structure() -> None:
    near, tokens, bounds = Near(5), torch.randn(11, 1, 4), torch.tensor([0, 2, 5, 11])
    with clearhead.use_kernel("chunked"):
        clearhead.attention_varlen(tokens, tokens, tokens, bounds, bounds, mask=near)
    assert near.structures == 1


def test_signatures_are_equal_for_masks_that_lower_alike() -> None:
    def both() -> Mask:
        return masks.causal() & masks.lengths(torch.randint(0, 5, (2,))) & Near(3)

    assert both().signature() == both().signature() is not None
    different = [
        *(masks.causal(), masks.causal("bottom_right"), ~masks.causal(), masks.causal() | masks.prefix(2), both()),
        *(masks.sliding_window(1, 0), masks.sliding_window(0, 1), masks.prefix(2)),
        *(masks.lengths(torch.tensor([1, 2])), masks.prefix(torch.tensor([1, 2]))),
        *(masks.keep(torch.ones(2, 2)), masks.keep(keys=torch.ones(2, 2)), masks.bias(torch.ones(2, 2))),
        *(masks.bias(torch.ones(2, 2, requires_grad=True)), masks.bias(torch.ones(2, 2, dtype=torch.float64))),
        *(masks.bias(torch.ones(2, 3).mT), masks.mask_mod(lambda b, h, q, k: q >= k)),
    ]
    signatures = [mask.signature() for mask in different]
    assert None not in signatures
    assert len(set(signatures)) == len(different)


def test_what_may_change_unseen_has_no_signature() -> None:
    step = torch.tensor(2)
    assert masks.mask_mod(lambda b, h, q, k: q % step == k).signature() is None


def test_documents_of_one_device_under_the_default_of_another() -> None:
    ids, query = torch.tensor([[0, 0, 1, 1, 1]]), torch.randn(1, 2, 5, 4)
    expected = clearhead.attention(query, query, query, masks.documents(ids))
    with torch.device("meta"):
        assert torch.equal(clearhead.attention(query, query, query, masks.documents(ids)), expected)
