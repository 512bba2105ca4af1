"""Queries that see no key, and what is stored in keys nobody sees: zeros and finite gradients on every kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.comparing import KERNELS
from tests.support.native import needs_native
from tests.support.oracle import Problem, gradients, solve

NATIVE = pytest.param("native", marks=needs_native)
BATCH, HEADS, LENGTH, COUNT, HEAD_DIM = 3, 5, 7, 2, 11
VISIBLE = torch.tensor([[0, 1], [0, 0], [1, 0]])


def inputs(rubbish: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM)
    hidden = (VISIBLE == 0)[:, None, :, None]
    key, value = (torch.randn(BATCH, HEADS, COUNT, HEAD_DIM).masked_fill(hidden, rubbish) for _ in range(2))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


@pytest.mark.parametrize("kernel", [*KERNELS, NATIVE])
@pytest.mark.parametrize("length", [1, LENGTH, 61])
def test_the_lowest_number_hides_nothing(kernel: str, length: int) -> None:
    """Masks of transformers hold it: a row of it alone says "everything alike", as large a bias as there is does."""
    lowest = torch.finfo(torch.float32).min
    query = torch.randn(1, 2, length, HEAD_DIM, requires_grad=True)
    key, value = (torch.randn(1, 2, 67, HEAD_DIM, requires_grad=True) for _ in range(2))
    bias = torch.zeros(length, 67)
    bias[0, 1:], bias[-1] = lowest, lowest
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(query, key, value, masks.bias(bias))
    output.sum().backward()
    torch.testing.assert_close(output[:, :, -1], value.mean(2))
    assert length == 1 or torch.equal(output[:, :, 0], value[:, :, 0])
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


@pytest.mark.parametrize("kernel", [NATIVE, "chunked", "reference"])
@pytest.mark.parametrize("rubbish", [0.0, torch.nan], ids=str)
def test_sinks_learn_from_the_lse_of_a_query_that_sees_nothing(kernel: str, rubbish: float) -> None:
    """Its log-sum-exp is the sink, whatever is stored in the keys it does not see."""
    query, key, value = inputs(rubbish)
    sinks = torch.arange(HEADS, dtype=torch.float32).requires_grad_()
    output_gradient, lse_gradient = torch.ones_like(query), torch.randn(query.shape[:3])
    with clearhead.use_kernel(kernel):
        output, lse = clearhead.attention(query, key, value, masks.keep(keys=VISIBLE), sinks=sinks, return_lse=True)
    torch.autograd.backward([output, lse], [output_gradient, lse_gradient])
    problem = Problem(query, key, value, lambda b, h, i, j: bool(VISIBLE[b, j]), sinks=sinks)
    *_, expected = gradients(solve(problem), output_gradient, lse_gradient)
    torch.testing.assert_close(sinks.grad.double(), expected, rtol=0, atol=1e-5)
