"""Masks as the Triton kernels read them, and the operators, by their formulas: no Triton is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.kernels._triton import Terms, available, columns, pooled, rows, weights_gradients
from clearhead.kernels._triton._formula import scores
from clearhead.kernels._triton._terms import lower
from clearhead.masks._lowering import dense_mask
from clearhead.positions import ALiBi
from tests.support.requests import Grid

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
    return scores(query, key, terms, 1.0, 0.0)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("positions", [(None, None), (4, None), (torch.arange(L) * 2 % 9, torch.arange(S))])
def test_terms_are_the_mask(name: str, positions: tuple[int | Tensor | None, int | Tensor | None]) -> None:
    ours = [each[None] if isinstance(each, Tensor) else each for each in positions]
    grid = Grid(B, H, L, S, torch.device("cpu"), ours[0], ours[1])
    expected = _as_bias(dense_mask(MASKS[name], grid))
    torch.testing.assert_close(_terms_as_bias(lower(MASKS[name], grid), grid), expected)


@pytest.mark.parametrize("start", [None, 0, 4])
@pytest.mark.parametrize("ids", [IDS, IDS[:1], IDS[1:]])
@pytest.mark.parametrize("other", [None, masks.causal(), masks.lengths(torch.tensor([12, 3]))])
def test_documents_keep_their_ids(start: int | None, ids: Tensor, other: masks.Mask | None) -> None:
    mask = masks.documents(ids) if other is None else masks.documents(ids) & other
    grid = Grid(B, H, S if start is None else L, S, torch.device("cpu"), start, None if start is None else 0)
    terms = lower(mask, grid)
    torch.testing.assert_close(_terms_as_bias(terms, grid), _as_bias(dense_mask(mask, grid)))
    if terms.first_query is not None and terms.last_query is not None:
        # No query outside the range of a key sees it.
        visible = dense_mask(mask, grid).any(1)  # (B, L, S)
        query = torch.arange(grid.query_length)[:, None]
        inside = (query >= terms.first_query[:, None]) & (query < terms.last_query[:, None])
        assert not bool((visible & ~inside).any())


def _operands() -> tuple[Tensor, Tensor, Tensor, Terms]:
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(B, H, L, 8, generator=draw), torch.randn(B, 2, S, 8, generator=draw)
    terms = lower(masks.causal("bottom_right") & masks.lengths(torch.tensor([13, 11])), Grid(B, H, L, S, query.device))
    return query, key, rows(query, key, terms, scale=0.5)["lse"], terms


def test_operators_give_what_attention_gives() -> None:
    query, key, lse, terms = _operands()
    mask = masks.causal("bottom_right") & masks.lengths(torch.tensor([13, 11]))
    weights = clearhead.attention_weights(query, key, mask, scale=0.5)
    received, viewers = columns(query, key, lse, terms, scale=0.5)
    torch.testing.assert_close(received, weights.sum(2))
    torch.testing.assert_close(viewers, (weights > 0).sum(2).float())
    found = rows(query, key, terms, scale=0.5, want=("confidence", "lse"))
    assert list(found) == ["lse", "confidence"]
    torch.testing.assert_close(found["confidence"], weights.amax(-1))
    of_cells = torch.stack([part.sum((-2, -1)) for part in weights.split(3, 2)], -1)
    torch.testing.assert_close(pooled(query, key, lse, terms, (3, 1), scale=0.5), of_cells[..., None])
    found = rows(query, key, terms, scale=0.5, top=3)
    largest, places = found["top_weights"], found["top_keys"]
    torch.testing.assert_close(largest, weights.sort(dim=-1, descending=True, stable=True).values[..., :3])
    torch.testing.assert_close(weights.gather(-1, places.clamp(min=0)).masked_fill(places < 0, 0), largest)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_of_weights_are_those_of_attention(average: bool, softcap: float | None) -> None:
    query, key, _, terms = _operands()
    sinks = torch.linspace(-1, 1, H)
    leaves = [each.requires_grad_() for each in (query, key, sinks)]
    mask = masks.causal("bottom_right") & masks.lengths(torch.tensor([13, 11]))
    options: dict[str, Any] = {"scale": 0.5, "softcap": softcap}
    found = clearhead.attention_weights(query, key, mask, sinks=sinks, average_attn_weights=average, **options)
    of_weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(found, leaves, of_weights)
    lse = rows(query, key, terms, sinks=sinks, **options)["lse"]
    gradient = of_weights[:, None] if average else of_weights
    of_query, of_key, means = weights_gradients(query, key, lse, gradient, terms, **options)
    of_sinks = -((sinks[:, None] - lse).exp() * means).sum((0, 2))
    torch.testing.assert_close((of_query, of_key, of_sinks.detach()), expected)


def test_operators_say_the_shapes_of_their_results() -> None:
    query, key, lse, terms = _operands()
    mask = terms.tensors, terms.numbers, 0.5, 0.0
    checks = ("test_schema", "test_faketensor")
    of = torch.ops.clearhead
    torch.library.opcheck(of.triton_rows.default, (query, key, None, None, *mask, [0, 2], 3), test_utils=checks)
    torch.library.opcheck(of.triton_columns.default, (query, key, lse, None, *mask), test_utils=checks)
    torch.library.opcheck(of.triton_pooled.default, (query, key, lse, None, *mask, [3, 2], True), test_utils=checks)
    of_weights = torch.randn(B, 1, L, S)
    operands = query, key, lse, of_weights
    torch.library.opcheck(of.triton_weights_gradients.default, (*operands, *mask), test_utils=checks)


def test_no_kernel_runs_on_the_cpu() -> None:
    assert not available(torch.zeros(1, 1, 1, 8))
