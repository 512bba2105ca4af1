"""`attention_weights`: exact weights of all queries or chosen ones, per head or averaged, with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.calls import Call, calls
from tests.support.oracle import Answer, solve, weights_gradients

BATCH, HEADS, KV_HEADS, LENGTH, COUNT, HEAD_DIM = 2, 6, 3, 7, 11, 5
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
averages = pytest.mark.parametrize("average", [False, True], ids=["per head", "average"])

QUERIES: dict[str, tuple[Any, list[int]]] = {
    "all": (None, [0, 1, 2, 3, 4, 5, 6]),
    "int": (3, [3]),
    "negative int": (-1, [6]),
    "slice": (slice(1, 6, 2), [1, 3, 5]),
    "backward slice": (slice(None, None, -3), [6, 3, 0]),
    "slice beyond the end": (slice(5, 100), [5, 6]),
    "empty slice": (slice(3, 3), []),
    "list": ([4, 0, 4, -2], [4, 0, 4, 5]),
    "tuple": ((2, 1), [2, 1]),
    "range": (range(2, 5), [2, 3, 4]),
    "empty list": ([], []),
    "tensor": (torch.tensor([6, 2]), [6, 2]),
    "int32 tensor": (torch.tensor([6, -7], dtype=torch.int32), [6, 0]),
    "uint8 tensor": (torch.tensor([6, 2], dtype=torch.uint8), [6, 2]),
    "scalar tensor": (torch.tensor(5), [5]),
    "empty tensor": (torch.tensor([], dtype=torch.int64), []),
    "bool tensor": (torch.tensor([1, 0, 0, 1, 0, 0, 1]).bool(), [0, 3, 6]),
}


def query_and_key(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64).to(dtype),
        torch.randn(BATCH, KV_HEADS, COUNT, HEAD_DIM, dtype=torch.float64).to(dtype),
    )


def compare_with_oracle(call: Call, rows: list[int] | None, average: bool) -> None:
    """Weights and gradients of chosen rows; the oracle always computes all of them."""
    answer = solve(call.problem)
    chosen = list(range(call.query.shape[2])) if rows is None else rows
    found = clearhead.attention_weights(
        *call.weights_arguments, **call.weights_options, queries=rows, average_attn_weights=average
    )
    rows_of_all = answer.weights[:, :, chosen]
    expected = rows_of_all.mean(1) if average else rows_of_all
    tolerance = TOLERANCES[call.query.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    assert torch.equal(found == 0, expected == 0), "hidden keys weigh exactly nothing"
    upstream = torch.randint(-8, 9, found.shape).to(found.dtype) / 4
    leaves = {name: x for name, x in call.named_inputs.items() if x.requires_grad and name != "value"}
    gradients = torch.autograd.grad(found, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)
    expected_gradients = oracle_gradients(call, answer, chosen, upstream, average)
    largest = max([1.0, *(float(exact.abs().max()) for exact in expected_gradients.values() if exact.numel())])
    for name, gradient in zip(leaves, gradients, strict=True):
        atol = largest * TOLERANCES[gradient.dtype]
        torch.testing.assert_close(gradient.double(), expected_gradients[name], rtol=0, atol=atol, msg=name)


def oracle_gradients(
    call: Call, answer: Answer, chosen: list[int], upstream: Tensor, average: bool
) -> dict[str, Tensor]:
    heads = call.query.shape[1]
    per_head = (upstream.double() / heads)[:, None].repeat(1, heads, 1, 1) if average else upstream.double()
    for_all = torch.zeros_like(answer.weights).index_add(2, torch.tensor(chosen, dtype=torch.int64), per_head)
    return dict(zip(call.named_inputs, weights_gradients(answer, for_all), strict=True))


@pytest.mark.parametrize(("dtype", "blocks"), [(torch.float32, "few"), (torch.float64, "many")])
def test_equals_oracle(dtype: torch.dtype, blocks: str, request: pytest.FixtureRequest) -> None:
    if blocks == "many":
        request.getfixturevalue("small_blocks")

    @given(calls(dtype), st.data())
    def compare(call: Call, data: st.DataObject) -> None:
        length = call.query.shape[2]
        rows = None
        if length and data.draw(st.booleans()):
            rows = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4))
        compare_with_oracle(call, rows, average=data.draw(st.booleans()))

    compare()


@pytest.mark.parametrize("form", QUERIES)
@averages
def test_forms_of_queries(form: str, average: bool) -> None:
    queries, rows = QUERIES[form]
    query, key = query_and_key()
    everything = clearhead.attention_weights(query, key, masks.sliding_window(2, 3), average_attn_weights=average)
    found = clearhead.attention_weights(
        query, key, masks.sliding_window(2, 3), queries=queries, average_attn_weights=average
    )
    assert found.shape == ((BATCH, len(rows), COUNT) if average else (BATCH, HEADS, len(rows), COUNT))
    torch.testing.assert_close(found, everything[..., rows, :])
    options = {"queries": queries, "average_attn_weights": average}
    unbatched = clearhead.attention_weights(query[1], key[1], masks.sliding_window(2, 3), **options)
    torch.testing.assert_close(unbatched, found[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_inputs_have_float32_weights(dtype: torch.dtype) -> None:
    query, key = query_and_key(dtype)
    weights = clearhead.attention_weights(query, key)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = clearhead.attention_weights(query.double(), key.double())
    torch.testing.assert_close(weights.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-5)


def test_no_gradient_is_recorded_without_a_leaf() -> None:
    query, key = query_and_key()
    assert not clearhead.attention_weights(query, key).requires_grad
    with torch.no_grad():
        assert not clearhead.attention_weights(query.requires_grad_(), key).requires_grad
