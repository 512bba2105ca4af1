"""Each mask against its definition in plain Python over (b, h, i, j)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from clearhead.positions import ALiBi, RelativeBias
from tests.support.mask_cases import PREDICATES, Frame, combined_masks, draw_frame, marks_rule
from tests.support.oracle import Rule

B, H, L, S = 2, 3, 5, 7

QUERY_POSITIONS = torch.tensor([3, 0, 9, 4, 4])
KEY_POSITIONS = torch.tensor([4, 2, 0, 9, 5, 1, 3])
DOCUMENTS = torch.tensor([5, 5, 1, 1, 1, 5, 0, 0, 2, 2])


def table(rule: Rule, batch: int = B, heads: int = H, queries: int = L, keys: int = S) -> Tensor:
    cells = [rule(b, h, i, j) for b in range(batch) for h in range(heads) for i in range(queries) for j in range(keys)]
    return torch.tensor(cells, dtype=torch.bool).reshape(batch, heads, queries, keys)


def assert_means(mask: Mask | Tensor, expected: Tensor, **positions: Tensor | int) -> None:
    """By `dense`, and by a call in which exactly the visible keys have weight."""
    batch, heads, queries, keys = expected.shape
    if isinstance(mask, Mask):
        dense = mask.dense(queries, keys, batch_size=batch, num_heads=heads, **positions)
        assert torch.equal(dense > -torch.inf if dense.is_floating_point() else dense, expected)
    query, key = torch.zeros(batch, heads, queries, 2), torch.zeros(batch, heads, keys, 2)
    weights = clearhead.attention_weights(query, key, mask, **positions)
    assert torch.equal(weights > 0, expected)


def frames(draw: st.DrawFn) -> tuple[Frame, dict[str, Tensor]]:
    length, count = draw(st.sampled_from([(L, S), (S, L), (L, L)]))
    return draw_frame(draw, B, H, length, count, torch.Generator().manual_seed(draw(st.integers(0, 99))))


@pytest.mark.parametrize("kind", PREDICATES)
@given(data=st.data())
def test_each_mask_means_its_rule(kind: str, data: st.DataObject) -> None:
    frame, positions = frames(data.draw)
    part = PREDICATES[kind](data.draw, frame)
    assert_means(part.mask, table(part.rule, B, H, frame.length, frame.count), **positions)


@given(data=st.data())
def test_operators_are_boolean_algebra(data: st.DataObject) -> None:
    frame, positions = frames(data.draw)
    part = data.draw(combined_masks(frame))
    assert_means(part.mask, table(part.rule, B, H, frame.length, frame.count), **positions)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_positions_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    # A window reaches below zero, where unsigned numbers wrap around; `documents` indexes with positions.
    positions = {"query_positions": QUERY_POSITIONS.to(dtype), "key_positions": KEY_POSITIONS.to(dtype)}
    q, k, ids = QUERY_POSITIONS.tolist(), KEY_POSITIONS.tolist(), DOCUMENTS.tolist()
    assert_means(masks.sliding_window(2, 1), table(lambda b, h, i, j: q[i] - 2 <= k[j] <= q[i] + 1), **positions)
    assert_means(masks.documents(DOCUMENTS), table(lambda b, h, i, j: ids[q[i]] == ids[k[j]]), **positions)


SHAPES = [
    *((L, S), (1, S), (L, 1), (B, L, S), (1, L, S), (B, 1, S), (B * H, L, S), (B * H, 1, S)),
    *((B, H, L, S), (1, H, L, S), (B, 1, L, S), (B, 1, 1, S), (1, H, 1, 1)),
]


def pattern(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keep_and_drop_take_every_shape_with_opposite_meaning(shape: tuple[int, ...]) -> None:
    """A plain bool tensor is `keep`."""
    marks = pattern(shape)
    visible = table(marks_rule(marks, B, H))
    for mask, expected in ((masks.keep(marks), visible), (marks, visible), (masks.drop(marks), ~visible)):
        assert_means(mask, expected)


@pytest.mark.parametrize("heads", [1, 3])
def test_three_sizes_without_a_batch_are_one_per_head(heads: int) -> None:
    marks = pattern((heads, L, S))
    weights = clearhead.attention_weights(torch.zeros(heads, L, 2), torch.zeros(heads, S, 2), masks.keep(marks))
    assert torch.equal(weights > 0, marks)


NUMBERS = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_marks_may_be_bools_or_numbers_that_are_zero_or_one(dtype: torch.dtype) -> None:
    marks = pattern((L, S))
    assert_means(masks.keep(marks.to(dtype)), table(lambda b, h, i, j: bool(marks[i, j])))
    assert_means(masks.drop(marks.to(dtype)), table(lambda b, h, i, j: not marks[i, j]))
    per_key = pattern((B, S))
    assert_means(masks.keep(keys=per_key.to(dtype)), table(lambda b, h, i, j: bool(per_key[b, j])))
    assert_means(masks.drop(keys=per_key.to(dtype)), table(lambda b, h, i, j: not per_key[b, j]))


@pytest.mark.parametrize("read", [masks.keep, masks.drop])
@pytest.mark.parametrize("keys", [False, True], ids=["positional", "keys="])
@pytest.mark.parametrize("number", [-torch.inf, 0.5, -1e9, torch.nan, 2.0])
def test_marks_refuse_other_floats(read: Callable[..., Mask], keys: bool, number: float) -> None:
    additive = torch.tensor([[0.0, number], [1.0, 0.0]])
    with pytest.raises(TypeError, match=r"0 or 1.*float32.*masks\.bias\(t\)"):
        read(**{"keys" if keys else "tensor": additive})


def test_a_bool_tensor_combines_like_keep() -> None:
    marks = pattern((L, S))
    assert_means(masks.causal() & marks, table(lambda b, h, i, j: j <= i and bool(marks[i, j])))
    assert_means(masks.causal() | marks, table(lambda b, h, i, j: j <= i or bool(marks[i, j])))


@pytest.mark.parametrize("other", [masks.causal(), masks.bias(torch.zeros(L, S))], ids=["predicate", "bias"])
def test_a_bias_has_no_or_and_no_opposite(other: Mask) -> None:
    bias = masks.bias(torch.zeros(L, S))
    for mask in (bias, masks.causal() & bias, ALiBi(3), RelativeBias(3)):
        for combine in (lambda mask=mask: mask | other, lambda mask=mask: other | mask, lambda mask=mask: ~mask):
            with pytest.raises(TypeError, match=r"a bias adds numbers to scores.*no 'or' and no opposite.*& only"):
                combine()


CHOICE = r"masks\.bias\(t\) adds.*masks\.keep\(t\) reads 1 as visible.*masks\.drop\(t\) reads 1 as hidden"
OTHERS: list[tuple[Any, str]] = [
    (None, "another mask or a bool tensor, got NoneType"),
    ("causal", "another mask or a bool tensor, got str"),
    (torch.zeros(L, L), CHOICE),
    (torch.zeros(L, L).long(), CHOICE),
]


@pytest.mark.parametrize(("other", "text"), OTHERS, ids=["None", "str", "float tensor", "int tensor"])
@pytest.mark.parametrize("combine", [operator.and_, operator.or_])
def test_masks_combine_with_masks_and_bool_tensors_only(combine: Callable[..., Any], other: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        combine(masks.causal(), other)


# Absolute positions of a call: an int counts up, tensors give each position, and keys may differ between heads.


HEADS, KV_HEADS, KEYS = 6, 3, 11
RULES: dict[str, Mask] = {
    "causal": masks.causal(),
    "bottom right": masks.causal("bottom_right"),
    "window": masks.sliding_window(3, 1),
    "causal window": masks.causal() & masks.sliding_window(2, 0),
    "prefix": masks.causal() | masks.prefix(4),
    "lengths": masks.lengths(torch.tensor([6, 9])),
    "where": masks.mask_mod(lambda b, h, q, k: (q + k + h) % 2 == 0),
    "documents": masks.documents(torch.arange(23) // 4),
}


def operands() -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(B, HEADS, L, 7, dtype=torch.float64)
    return query, *torch.randn(2, B, KV_HEADS, KEYS, 7, dtype=torch.float64)


@pytest.mark.parametrize("kernel", ["chunked", "reference", None])
@pytest.mark.parametrize(("first_query", "first_key"), [(6, 0), (3, 4), (0, 8), (12, 5)])
@pytest.mark.parametrize("rule", RULES)
def test_an_int_counts_up(rule: str, first_query: int, first_key: int, kernel: str | None) -> None:
    mask, (query, key, value) = RULES[rule], operands()
    starts = {"query_positions": first_query, "key_positions": first_key}
    counted = {
        "query_positions": torch.arange(first_query, first_query + L),
        "key_positions": torch.arange(first_key, first_key + KEYS),
    }
    shown = mask.dense(L, KEYS, batch_size=B, num_heads=HEADS, **starts)
    assert torch.equal(shown, mask.dense(L, KEYS, batch_size=B, num_heads=HEADS, **counted))
    with clearhead.use_kernel("reference"):
        expected = clearhead.attention(query, key, value, masks.keep(shown))
    with clearhead.use_kernel(kernel) if kernel else nullcontext():
        output = clearhead.attention(query, key, value, mask, **starts)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_keys_that_differ_between_heads() -> None:
    query, key, value = operands()
    positions, queries = torch.randint(0, 20, (B, HEADS, KEYS)), torch.tensor([4, 5, 6, 12, 19])
    for mask in (masks.causal(), masks.sliding_window(3, 2), masks.documents(torch.arange(20) // 3)):
        output = clearhead.attention(query, key, value, mask, query_positions=queries, key_positions=positions)
        for head in range(HEADS):
            of_head = query[:, [head]], key[:, [head // 2]], value[:, [head // 2]]
            positions_of_head = {"query_positions": queries, "key_positions": positions[:, head]}
            alone = clearhead.attention(*of_head, mask, **positions_of_head)
            torch.testing.assert_close(output[:, [head]], alone, rtol=0, atol=1e-12)
