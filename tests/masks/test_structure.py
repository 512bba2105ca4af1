"""A mask by the recipe of docs/extending.md: kernels and plans use its structure, and need nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._layer import plan
from clearhead.kernels._choice import choose
from clearhead.masks import Mask
from clearhead.masks._structure import Band, Structure
from clearhead.positions import ALiBi, RelativeBias
from tests.support.native import extension
from tests.support.requests import Block, Grid, bind

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

    def describe(self) -> str:
        return f"near({self._distance})"


@pytest.mark.parametrize("kernel", [None, "chunked", "reference"])
def test_the_recipe_alone_works(kernel: str | None) -> None:
    query, key = torch.randn(1, 2, 17, 4), torch.randn(1, 2, 23, 4)
    for mask in (Every(3), Every(3) & masks.causal(), Every(3) | masks.causal(), ~Every(3)):
        expected = clearhead.attention(query, key, key, masks.keep(mask.dense(17, 23)))
        with clearhead.use_kernel(kernel) if kernel else torch.no_grad():
            assert torch.allclose(clearhead.attention(query, key, key, mask), expected, atol=1e-5)


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
    assert near.structures == 2  # one for the plan, one at the positions within sequences


def key_of(mask: Mask, sized: bool = True) -> object:
    return bind(mask, Grid(2, 3, 5, 5, torch.device("cpu"))).key(sized)


def test_keys_are_equal_for_masks_that_are_read_alike() -> None:
    def both() -> Mask:
        return masks.causal() & masks.lengths(torch.randint(0, 5, (2,))) & Near(3)

    assert key_of(both()) == key_of(both()) is not None
    assert key_of(masks.causal(), False) == key_of(masks.sliding_window(1, 1), False)  # the band is an argument
    different = [
        *(masks.causal(), ~masks.causal(), masks.causal() | masks.prefix(torch.tensor([2, 3])), both()),
        *(masks.sliding_window(1, 0), masks.sliding_window(0, 1), masks.prefix(2)),
        *(masks.lengths(torch.tensor([1, 2])), masks.documents(torch.tensor([0, 1, 0, 1, 1]))),
        *(masks.keep(torch.ones(5, 5)), masks.keep(keys=torch.ones(2, 5)), masks.bias(torch.ones(5, 5))),
        *(masks.bias(torch.ones(5, 5, requires_grad=True)), masks.bias(torch.ones(5, 5, dtype=torch.float64))),
        *(masks.bias(torch.ones(5, 5).mT), masks.selected(torch.zeros(1, 5, 1, dtype=torch.long))),
        *(masks.selected(torch.zeros(1, 5, 1, dtype=torch.long), block=2), ALiBi(3), RelativeBias(3)),
    ]
    keys = [key_of(mask) for mask in different]
    assert None not in keys
    assert len(set(keys)) == len(different)


def test_negated_views_have_no_key() -> None:
    assert key_of(masks.bias(torch.ones(5, 5, dtype=torch.cfloat).conj().imag)) is None


@pytest.mark.parametrize("also", [None, masks.causal()], ids=["alone", "causal"])
@pytest.mark.parametrize("around", [lambda mask: mask, lambda mask: ~mask, lambda mask: mask | masks.prefix(2)])
def test_a_function_that_begins_to_differ_between_heads(around: Callable[[Mask], Mask], also: Mask | None) -> None:
    """Its plan depends on whether it does, which is looked at in every call."""
    step, query = [1], torch.randn(2, 3, 5, 4)
    mask = around(masks.mask_mod(lambda b, h, q, k: (q + (h if step[0] else 0) - k) % 2 == 0))
    mask = mask if also is None else mask & also
    for step[0] in (0, 1, 0):
        expected = clearhead.attention(query, query, query, masks.keep(mask.dense(5, batch_size=2, num_heads=3)))
        torch.testing.assert_close(clearhead.attention(query, query, query, mask), expected)
        refused = clearhead.explain(query, query, query, mask).reasons["native"]
        assert extension is None or bool(refused) == bool(step[0])


@pytest.mark.parametrize(
    "mask", [ALiBi(3), RelativeBias(3), ~masks.causal(), Every(2), Every(2) | masks.causal()], ids=str
)
def test_masks_without_an_exact_structure_are_planned_once(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    query, planned = torch.randn(2, 3, 5, 11), list[object]()

    def counted(*arguments: Any) -> Any:
        planned.append(arguments)
        return choose(*arguments)

    monkeypatch.setattr(plan, "choose", counted)
    with torch.no_grad():
        for _ in range(3):
            clearhead.attention(query, query, query, mask)
    assert len(planned) <= 2  # the second is that of a kernel which is planned for each size


def test_documents_of_one_device_under_the_default_of_another() -> None:
    ids, query = torch.tensor([[0, 0, 1, 1, 1]]), torch.randn(1, 2, 5, 4)
    expected = clearhead.attention(query, query, query, masks.documents(ids))
    with torch.device("meta"):
        assert torch.equal(clearhead.attention(query, query, query, masks.documents(ids)), expected)
