"""Sinks of each query, (B, H, L, 1), beside a softmax with one more column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import ShapeError
from clearhead.integrations.transformers import attention_forward

BATCH, HEADS, LENGTH, KEYS, DIM = 2, 3, 5, 7, 4


@pytest.fixture
def operands() -> list[Tensor]:
    torch.manual_seed(3)
    shapes = [(HEADS, LENGTH, DIM), (HEADS, KEYS, DIM), (HEADS, KEYS, DIM), (HEADS, LENGTH, KEYS), (HEADS, LENGTH, 1)]
    return [torch.randn(BATCH, *shape, requires_grad=True) for shape in shapes]


def by_column(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor, mask: Tensor) -> list[Tensor]:
    scores = (query @ key.mT / DIM**0.5 + bias).masked_fill(~mask, float("-inf"))
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return [(weights @ value).transpose(1, 2), weights]


@pytest.mark.parametrize("wanted", [False, True])
def test_output_weights_and_gradients_are_those_of_one_more_column(operands: list[Tensor], wanted: bool) -> None:
    mask = torch.rand(BATCH, 1, LENGTH, KEYS) > 0.3
    mask[1, :, 2] = False  # this query sees its sink only
    query, key, value, bias, sinks = operands
    module = nn.Module().eval()
    options = {"position_bias": bias, "sinks": sinks, "output_attentions": wanted}
    actual = attention_forward(module, query, key, value, mask, **options)
    exact = [x.detach().double().requires_grad_() for x in operands]
    expected = by_column(*exact, mask)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=0, atol=1e-5)
    if wanted:
        torch.testing.assert_close(actual[1].double(), expected[1], rtol=0, atol=1e-5)  # type: ignore[union-attr]
    into = torch.randn(expected[0].shape, dtype=torch.float64)
    gradients = torch.autograd.grad(actual[0], operands, into.float())
    for ours, theirs in zip(gradients, torch.autograd.grad(expected[0], exact, into), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)


def test_sinks_of_another_shape_are_refused(operands: list[Tensor]) -> None:
    query, key, value, _, sinks = operands
    with pytest.raises(ShapeError, match=r"sinks: expected \(B or 1, H, L, 1\) with B = 2, H = 3, L = 5"):
        attention_forward(nn.Module(), query, key, value, None, sinks=sinks.squeeze(-1))


def test_a_record_has_the_weights_beside_sinks_of_queries(operands: list[Tensor]) -> None:
    query, key, value, bias, sinks = operands

    class Layer(nn.Module):
        def forward(self) -> Tensor:
            return attention_forward(self, query, key, value, None, sinks=sinks)[0]

    layer, every = Layer(), torch.ones(1, dtype=torch.bool)
    with torch.no_grad(), clearhead.record(layer, keep="queries_keys") as rec:
        layer()
    _, weights = by_column(query, key, value, torch.zeros_like(bias), sinks, every)
    torch.testing.assert_close(rec.weights(""), weights.detach(), rtol=0, atol=1e-6)
