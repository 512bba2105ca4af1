"""`attention_weights`: exact weights of all queries or chosen ones, per head or averaged, with their gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from tests.support.calls import Call, calls
from tests.support.oracle import Answer, solve, weights_gradients

BATCH, HEADS, KV_HEADS, LENGTH, COUNT, HEAD_DIM = 2, 6, 3, 7, 11, 5
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
EXACT = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)

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


def differentiable(call: Call) -> dict[str, Tensor]:
    sinks = {} if call.problem.sinks is None else {"sinks": call.problem.sinks}
    biases = {f"bias {number}": bias for number, bias in enumerate(call.problem.biases)}
    inputs = {"query": call.query, "key": call.key, **sinks, **biases}
    return {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}


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
    wanted = differentiable(call)
    gradients = torch.autograd.grad(found, list(wanted.values()), upstream, allow_unused=True)
    expected_gradients = oracle_gradients(call, answer, chosen, upstream, average)
    largest = max([1.0, *(float(one.abs().max()) for one in expected_gradients.values() if one.numel())])
    for (name, tensor), gradient in zip(wanted.items(), gradients, strict=True):
        one = torch.zeros_like(tensor) if gradient is None else gradient
        atol = largest * TOLERANCES[one.dtype]
        torch.testing.assert_close(one.double(), expected_gradients[name], rtol=0, atol=atol, msg=f"gradient of {name}")


def oracle_gradients(
    call: Call, answer: Answer, chosen: list[int], upstream: Tensor, average: bool
) -> dict[str, Tensor]:
    heads = call.query.shape[1]
    per_head = (upstream.double() / heads)[:, None].repeat(1, heads, 1, 1) if average else upstream.double()
    for_all = torch.zeros_like(answer.weights).index_add(2, torch.tensor(chosen, dtype=torch.int64), per_head)
    names = ["query", "key", "value", *([] if call.problem.sinks is None else ["sinks"])]
    names += [f"bias {number}" for number in range(len(call.problem.biases))]
    return dict(zip(names, weights_gradients(answer, for_all), strict=True))


def rows_of(call: Call, data: st.DataObject) -> list[int] | None:
    length = call.query.shape[2]
    if length == 0 or data.draw(st.booleans()):
        return None
    return data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4))


@EXACT
@pytest.mark.parametrize("average", [False, True], ids=["per head", "average"])
def test_equals_oracle(dtype: torch.dtype, average: bool) -> None:
    @given(calls(dtype), st.data())
    def compare(call: Call, data: st.DataObject) -> None:
        compare_with_oracle(call, rows_of(call, data), average)

    compare()


@pytest.mark.parametrize("average", [False, True], ids=["per head", "average"])
def test_equals_oracle_in_many_blocks(average: bool, small_blocks: None) -> None:
    @given(calls(torch.float64), st.data())
    def compare(call: Call, data: st.DataObject) -> None:
        compare_with_oracle(call, rows_of(call, data), average)

    compare()


@pytest.mark.parametrize("form", QUERIES)
@pytest.mark.parametrize("average", [False, True], ids=["per head", "average"])
def test_forms_of_queries(form: str, average: bool) -> None:
    queries, rows = QUERIES[form]
    query, key = query_and_key()
    everything = clearhead.attention_weights(query, key, masks.sliding_window(2, 3), average_attn_weights=average)
    found = clearhead.attention_weights(
        query, key, masks.sliding_window(2, 3), queries=queries, average_attn_weights=average
    )
    assert found.shape == ((BATCH, len(rows), COUNT) if average else (BATCH, HEADS, len(rows), COUNT))
    torch.testing.assert_close(found, everything[..., rows, :])


@pytest.mark.parametrize("queries", [LENGTH, -LENGTH - 1, [0, 99], torch.tensor([-8])], ids=str)
def test_queries_out_of_range(queries: object) -> None:
    query, key = query_and_key()
    rows = torch.as_tensor(queries).reshape(-1).tolist()
    with pytest.raises(ArgumentError, match=rf"queries: expected row numbers below L = 7, got {re.escape(str(rows))}"):
        clearhead.attention_weights(query, key, queries=queries)


def test_marks_of_another_length() -> None:
    query, key = query_and_key()
    with pytest.raises(ArgumentError, match=r"queries: expected a bool tensor \(7,\), got \(3,\)"):
        clearhead.attention_weights(query, key, queries=torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize("queries", [1.5, [0.0, 1.0], [[0, 1]], True, "first", [None]], ids=str)
def test_queries_that_are_no_row_numbers(queries: object) -> None:
    query, key = query_and_key()
    with pytest.raises(DTypeError, match="queries: expected an int, a slice or a list"):
        clearhead.attention_weights(query, key, queries=queries)


def test_bad_inputs_are_named() -> None:
    query, key = query_and_key()
    with pytest.raises(ShapeError, match="key: expected head_dim D = 5"):
        clearhead.attention_weights(query, key[..., :3])
    with pytest.raises(DTypeError, match="key: expected query's dtype"):
        clearhead.attention_weights(query, key.double())
    with pytest.raises(DTypeError, match=r"key: expected a torch\.Tensor, got NoneType"):
        clearhead.attention_weights(query, None)
    with pytest.raises(ShapeError, match=r"\(B, H, L, D\)"):
        clearhead.attention_weights(query, key[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_sum_to_one_and_half_inputs_give_float32(dtype: torch.dtype) -> None:
    weights = clearhead.attention_weights(*query_and_key(dtype))
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_inputs_are_weighed_in_float32(dtype: torch.dtype) -> None:
    query, key = query_and_key(dtype)
    exact = clearhead.attention_weights(query.double(), key.double())
    torch.testing.assert_close(clearhead.attention_weights(query, key).double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("average", [False, True], ids=["per head", "average"])
def test_hidden_keys_weigh_nothing_and_hidden_queries_give_nothing(average: bool) -> None:
    visible = torch.rand(LENGTH, COUNT) > 0.4
    visible[3] = False
    query, key = query_and_key()
    weights = clearhead.attention_weights(query, key, visible, average_attn_weights=average)
    assert not weights[..., ~visible].any()
    assert (weights[..., visible] > 0).all()
    sums = weights.sum(-1)
    assert not sums[..., 3].any()
    torch.testing.assert_close(sums[..., [0, 1, 2, 4, 5, 6]], torch.ones_like(sums[..., 1:]), rtol=0, atol=1e-5)


def test_sinks_take_their_share() -> None:
    query, key = query_and_key(torch.float64)
    sinks = torch.linspace(-2, 3, HEADS, dtype=torch.float64)
    _, lse = clearhead.attention(query, key, key, sinks=sinks, return_lse=True)
    weights = clearhead.attention_weights(query, key, sinks=sinks)
    share = (sinks[None, :, None] - lse).exp()
    torch.testing.assert_close(weights.sum(-1) + share, torch.ones_like(share), rtol=0, atol=1e-10)


def test_they_are_what_attention_mixes_the_values_with() -> None:
    query, key = query_and_key(torch.float64)
    value = torch.randn(BATCH, KV_HEADS, COUNT, 3, dtype=torch.float64)
    options: dict[str, Any] = {"scale": 0.7, "softcap": 2.0, "sinks": torch.ones(HEADS, dtype=torch.float64)}
    mask = masks.causal("bottom_right") & masks.lengths(torch.tensor([COUNT, 4]))
    weights = clearhead.attention_weights(query, key, mask, **options)
    mixed = weights @ value.repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(mixed, clearhead.attention(query, key, value, mask, **options), rtol=0, atol=1e-10)


def test_received_mass_is_a_gradient_of_the_output() -> None:
    """Σ_i w_i p_ij is the gradient of w·o in v: an oracle that knows nothing of weights."""
    query, key = query_and_key(torch.float64)
    value = torch.zeros(BATCH, HEADS, COUNT, 1, dtype=torch.float64, requires_grad=True)
    wide_key = key.repeat_interleave(HEADS // KV_HEADS, 1)
    output = clearhead.attention(query, wide_key, value, masks.causal("bottom_right"))
    (received,) = torch.autograd.grad(output.sum(), value)
    weights = clearhead.attention_weights(query, key, masks.causal("bottom_right"))
    torch.testing.assert_close(weights.sum(2), received[..., 0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("average", [False, True], ids=["per head", "average"])
def test_without_a_batch(average: bool) -> None:
    query, key = query_and_key()
    found = clearhead.attention_weights(query[1], key[1], masks.causal(), queries=[5], average_attn_weights=average)
    expected = clearhead.attention_weights(query, key, masks.causal(), queries=[5], average_attn_weights=average)[1]
    torch.testing.assert_close(found, expected)


def test_positions_are_those_masks_speak_of() -> None:
    query, key = query_and_key()
    weights = clearhead.attention_weights(query, key, masks.causal(), query_positions=torch.arange(4, 4 + LENGTH))
    assert torch.equal(weights[0, 0] > 0, torch.ones(LENGTH, COUNT).tril(4).bool())


def test_poisoned_padding_stays_outside() -> None:
    query, key = query_and_key()
    visible = torch.arange(COUNT).expand(BATCH, COUNT) < 4
    expected = clearhead.attention_weights(query, key, masks.keep(keys=visible))
    poisoned = key.masked_fill(~visible[:, None, :, None], torch.nan).requires_grad_()
    found = clearhead.attention_weights(query, poisoned, masks.keep(keys=visible))
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    assert poisoned.grad.isfinite().all()


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    query, key = query_and_key()
    assert not clearhead.attention_weights(query, key).requires_grad
    with torch.no_grad():
        assert not clearhead.attention_weights(query.requires_grad_(), key).requires_grad


@pytest.mark.parametrize("shape", [(0, 3, 7, 11), (2, 3, 0, 11), (2, 3, 7, 0)], ids=str)
@pytest.mark.parametrize("average", [False, True], ids=["per head", "average"])
def test_nothing_to_weigh(shape: tuple[int, int, int, int], average: bool) -> None:
    batch, heads, length, count = shape
    query, key = torch.zeros(batch, heads, length, 5, requires_grad=True), torch.zeros(batch, heads, count, 5)
    weights = clearhead.attention_weights(query, key, masks.causal(), average_attn_weights=average)
    assert weights.shape == ((batch, length, count) if average else shape)
    weights.sum().backward()
    assert query.grad is not None
    assert not query.grad.any()
