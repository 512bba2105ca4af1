"""Queries that see no key, and what is stored in keys nobody sees: zeros and finite gradients on every kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._native import instruction_sets
from tests.support.comparing import KERNELS
from tests.support.oracle import Problem, gradients, solve

BATCH, HEADS, LENGTH, COUNT, HEAD_DIM = 3, 5, 7, 2, 11
VISIBLE = torch.tensor([[0, 1], [0, 0], [1, 0]])
EMPTY = 1  # the batch item whose row of VISIBLE hides every key

MASKS = {
    "keys": lambda: masks.keep(keys=VISIBLE),
    "four sizes": lambda: masks.keep(VISIBLE[:, None, None, :]),
    "drop": lambda: masks.drop(keys=1 - VISIBLE),
    "bool tensor": lambda: VISIBLE[:, None, None, :].bool(),
    "bias": lambda: masks.bias(torch.where(VISIBLE.bool(), 0.0, -torch.inf)[:, None, None, :]),
}

mask_names = pytest.mark.parametrize("mask_name", MASKS)
kernels = pytest.mark.parametrize("kernel", KERNELS)


def inputs(rubbish: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM)
    hidden = (VISIBLE == 0)[:, None, :, None]
    key, value = (torch.randn(BATCH, HEADS, COUNT, HEAD_DIM).masked_fill(hidden, rubbish) for _ in range(2))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


@kernels
@mask_names
@pytest.mark.parametrize("rubbish", [0.0, torch.nan, torch.inf], ids=str)
def test_output_is_zero_and_gradients_are_the_oracles(kernel: str, mask_name: str, rubbish: float) -> None:
    query, key, value = inputs(rubbish)
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(query, key, value, MASKS[mask_name]())
    output.sum().backward()
    answer = solve(Problem(query, key, value, lambda b, h, i, j: bool(VISIBLE[b, j])))
    assert not output[EMPTY].any()
    torch.testing.assert_close(output.double(), answer.output, rtol=0, atol=1e-5)
    for tensor, expected in zip((query, key, value), gradients(answer, torch.ones_like(output)), strict=True):
        torch.testing.assert_close(tensor.grad.double(), expected, rtol=0, atol=1e-5)
        assert not tensor.grad[EMPTY].any()


@mask_names
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("need_weights", [False, True])
def test_module_returns_its_bias(mask_name: str, training: bool, dropout: float, need_weights: bool) -> None:
    module = clearhead.MultiHeadAttention(HEADS * HEAD_DIM, HEADS, dropout=dropout).train(training)
    torch.nn.init.normal_(module.out_proj.bias)
    query = torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, requires_grad=True)
    memory = torch.randn(BATCH, COUNT, HEADS * HEAD_DIM, requires_grad=True)
    result = module(query, memory, mask=MASKS[mask_name](), need_weights=need_weights)
    output, weights = result if need_weights else (result, None)
    torch.testing.assert_close(output[EMPTY], module.out_proj.bias.expand(LENGTH, -1))
    loss = output.square().sum()
    if weights is not None:
        assert not weights[EMPTY].any()
        torch.testing.assert_close(weights[[0, 2]].sum(-1), torch.ones(2, LENGTH))
        loss = loss + weights.square().sum()
    loss.backward()
    assert not query.grad[EMPTY].any()
    assert not memory.grad[EMPTY].any()
    for tensor in (query, memory, *module.parameters()):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("kernel", [*KERNELS, *(["native"] if instruction_sets() else [])])
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


@pytest.mark.parametrize("kernel", ["native", "chunked", "reference"])
@pytest.mark.parametrize("rubbish", [0.0, torch.nan], ids=str)
def test_sinks_learn_from_the_lse_of_a_query_that_sees_nothing(kernel: str, rubbish: float) -> None:
    """Its log-sum-exp is the sink, whatever is stored in the keys it does not see."""
    if kernel == "native" and not instruction_sets():
        pytest.skip("the native kernel is not built here")
    query, key, value = inputs(rubbish)
    sinks = torch.arange(HEADS, dtype=torch.float32).requires_grad_()
    output_gradient, lse_gradient = torch.ones_like(query), torch.randn(query.shape[:3])
    with clearhead.use_kernel(kernel):
        output, lse = clearhead.attention(query, key, value, MASKS["keys"](), sinks=sinks, return_lse=True)
    torch.autograd.backward([output, lse], [output_gradient, lse_gradient])
    problem = Problem(query, key, value, lambda b, h, i, j: bool(VISIBLE[b, j]), sinks=sinks)
    *_, expected = gradients(solve(problem), output_gradient, lse_gradient)
    torch.testing.assert_close(sinks.grad.double(), expected, rtol=0, atol=1e-5)
