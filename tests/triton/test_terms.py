"""Masks as the Triton kernels read them. No Triton is needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.kernel_formulas import scores
from clearhead import masks
from clearhead.kernels._triton import Operands, available
from clearhead.masks._lowering import dense_mask
from clearhead.masks._terms import Terms, terms_of
from clearhead.positions import ALiBi
from tests.support.requests import BoundMask, Grid

B, H, L, S = 2, 4, 9, 13
IDS = torch.tensor([[0, 0, 1, 1, 0, 2, 2, 1, 3, 3, 3, 0, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]])
MASKS = {
    "causal": masks.causal(),
    "bottom right": masks.causal("bottom_right"),
    "window": masks.sliding_window(3, 1),
    "prefix": masks.causal() | masks.prefix(4),
    "prefix of each item": masks.prefix(torch.tensor([0, 20])),
    "lengths": masks.causal() & masks.lengths(torch.tensor([13, 0])),
    "lengths of queries": masks.lengths(torch.tensor([13, 5]), torch.tensor([9, 2])),
    "length of each query": masks.lengths(torch.arange(18).view(2, 9) % 14),
    "keep": masks.keep(torch.arange(B * H * L * S).view(B, H, L, S) % 3 > 0),
    "marks": masks.drop(keys=torch.arange(26).view(2, 13) % 4 == 0),
    "two biases": masks.bias(torch.arange(L * S).view(L, S) / 9.0) & masks.bias(torch.ones(1, H, 1, S)),
    "biases of half precision": masks.bias(torch.rand(L, S).half()) & masks.bias(torch.rand(1, H, 1, S).half()),
    "ALiBi": masks.causal() & ALiBi(H),
    "not": ~masks.sliding_window(2, 2),
    "function": masks.mask_mod(lambda b, h, q, k: (q - k) % 2 == 0),
}


def _as_bias(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


def _terms_as_bias(terms: Terms, grid: Grid) -> Tensor:
    """Scores of products that are 0: the mask alone."""
    sizes = grid.batch_size, grid.num_heads
    query, key = torch.zeros(*sizes, grid.query_length, 2), torch.zeros(*sizes, grid.key_length, 2)
    return scores(Operands(query, key, terms, 1.0), torch.float32)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("positions", [(None, None), (4, None), (torch.arange(L) * 2 % 9, torch.arange(S))])
def test_terms_are_the_mask(name: str, positions: tuple[int | Tensor | None, int | Tensor | None]) -> None:
    ours = [each[None] if isinstance(each, Tensor) else each for each in positions]
    grid = Grid(B, H, L, S, torch.device("cpu"), ours[0], ours[1])
    expected = _as_bias(dense_mask(BoundMask(MASKS[name], grid)))
    torch.testing.assert_close(_terms_as_bias(terms_of(BoundMask(MASKS[name], grid)).with_all_ranges(), grid), expected)


@pytest.mark.parametrize("start", [None, 0, 4])
@pytest.mark.parametrize("ids", [IDS, IDS[:1], IDS[1:]])
@pytest.mark.parametrize("other", [None, masks.causal(), masks.lengths(torch.tensor([12, 3]))])
def test_documents_keep_their_ids(start: int | None, ids: Tensor, other: masks.Mask | None) -> None:
    mask = masks.documents(ids) if other is None else masks.documents(ids) & other
    grid = Grid(B, H, S if start is None else L, S, torch.device("cpu"), start, None if start is None else 0)
    terms = terms_of(BoundMask(mask, grid)).with_all_ranges()
    torch.testing.assert_close(_terms_as_bias(terms, grid), _as_bias(dense_mask(BoundMask(mask, grid))))
    if terms.first_query is not None and terms.last_query is not None:
        # No query outside the range of a key sees it.
        visible = dense_mask(BoundMask(mask, grid)).any(1)  # (B, L, S)
        query = torch.arange(grid.query_length)[:, None]
        inside = (query >= terms.first_query[:, None]) & (query < terms.last_query[:, None])
        assert not bool((visible & ~inside).any())


def test_no_kernel_runs_on_the_cpu() -> None:
    assert not available(torch.zeros(1, 1, 1, 8))
