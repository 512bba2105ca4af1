"""Each mask against its definition in plain Python over (b, h, i, j)."""

from __future__ import annotations

import operator
from collections.abc import Callable
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

B, H, L, S = 2, 3, 5, 7
Rule = Callable[[int, int, int, int], bool]

LENGTHS = torch.tensor([4, 0])
QUERY_POSITIONS = torch.tensor([3, 0, 9, 4, 4])
KEY_POSITIONS = torch.tensor([4, 2, 0, 9, 5, 1, 3])
QUERY_POSITIONS_PER_ITEM = torch.tensor([[3, 0, 9, 4, 4], [0, 1, 2, 8, 6]])
KEY_POSITIONS_PER_ITEM = torch.tensor([[4, 2, 0, 9, 5, 1, 3], [6, 5, 4, 3, 2, 1, 0]])
DOCUMENTS = torch.tensor([[5, 5, 1, 1, 1, 5, 0, 0, 2, 2], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]])  # (B, 10)


def table(rule: Rule, batch: int = B, heads: int = H, queries: int = L, keys: int = S) -> Tensor:
    cells = [rule(b, h, i, j) for b in range(batch) for h in range(heads) for i in range(queries) for j in range(keys)]
    return torch.tensor(cells, dtype=torch.bool).reshape(batch, heads, queries, keys)


def assert_means(mask: Mask | Tensor, expected: Tensor, **positions: Tensor | int) -> None:
    """By `dense`, and by a call whose scores are all equal, in which exactly the visible keys have weight."""
    batch, heads, queries, keys = expected.shape
    if isinstance(mask, Mask):
        seen = mask.dense(queries, keys, batch_size=batch, num_heads=heads, **positions)
        assert seen.dtype == torch.bool
        assert torch.equal(seen, expected)
    query, key = torch.zeros(batch, heads, queries, 2), torch.zeros(batch, heads, keys, 2)
    weights = clearhead.attention_weights(query, key, mask, **positions)
    assert torch.equal(weights > 0, expected)


POSITIONAL = [
    pytest.param(masks.causal(), lambda b, h, q, k: k <= q, id="causal"),
    pytest.param(masks.sliding_window(2, 1), lambda b, h, q, k: q - 2 <= k <= q + 1, id="window"),
    pytest.param(masks.sliding_window(0, 0), lambda b, h, q, k: k == q, id="window of one"),
    pytest.param(masks.sliding_window(99, 99), lambda b, h, q, k: True, id="window over everything"),
    pytest.param(masks.lengths(LENGTHS), lambda b, h, q, k: k < LENGTHS[b], id="lengths"),
    pytest.param(masks.prefix(3), lambda b, h, q, k: k < 3, id="prefix"),
    pytest.param(masks.prefix(0), lambda b, h, q, k: False, id="prefix of none"),
    pytest.param(masks.prefix(99), lambda b, h, q, k: True, id="prefix of all"),
    pytest.param(masks.prefix(torch.tensor([6, 1])), lambda b, h, q, k: k < (6, 1)[b], id="prefix per item"),
    pytest.param(
        masks.mask_mod(lambda b, h, q, k: (q + k + h * b) % 3 == 1),
        lambda b, h, q, k: (q + k + h * b) % 3 == 1,
        id="where",
    ),
]


def numbers(positions: Tensor | int, length: int) -> list[list[int]]:
    """The positions of each batch item. An int is the first one, and the others count up."""
    tensor = positions if isinstance(positions, Tensor) else torch.arange(positions, positions + length)
    return tensor.expand(B, length).tolist()


@pytest.mark.parametrize(("mask", "rule"), POSITIONAL)
@pytest.mark.parametrize(
    ("query_positions", "key_positions"),
    [(QUERY_POSITIONS, KEY_POSITIONS), (QUERY_POSITIONS_PER_ITEM, KEY_POSITIONS_PER_ITEM), (3, 1)],
    ids=["shared", "per item", "first"],
)
def test_positional_masks_speak_of_absolute_positions(
    mask: Mask, rule: Rule, query_positions: Tensor | int, key_positions: Tensor | int
) -> None:
    q, k = numbers(query_positions, L), numbers(key_positions, S)
    expected = table(lambda b, h, i, j: rule(b, h, q[b][i], k[b][j]))
    assert_means(mask, expected, query_positions=query_positions, key_positions=key_positions)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_missing_positions_count_from_zero_and_need_no_alignment(align: Any) -> None:
    q, k = QUERY_POSITIONS.tolist(), KEY_POSITIONS.tolist()
    mask, both = masks.causal(align), {"query_positions": QUERY_POSITIONS, "key_positions": KEY_POSITIONS}
    assert_means(mask, table(lambda b, h, i, j: j <= q[i]), query_positions=QUERY_POSITIONS)
    assert_means(mask, table(lambda b, h, i, j: k[j] <= i), key_positions=KEY_POSITIONS)
    assert_means(mask, table(lambda b, h, i, j: k[j] <= q[i]), **both)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_positions_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    # A window reaches below zero, where unsigned numbers wrap around; `documents` indexes with positions.
    positions = {"query_positions": QUERY_POSITIONS.to(dtype), "key_positions": KEY_POSITIONS.to(dtype)}
    q, k, ids = QUERY_POSITIONS.tolist(), KEY_POSITIONS.tolist(), DOCUMENTS[0].tolist()
    assert_means(masks.sliding_window(2, 1), table(lambda b, h, i, j: q[i] - 2 <= k[j] <= q[i] + 1), **positions)
    assert_means(masks.documents(DOCUMENTS[0]), table(lambda b, h, i, j: ids[q[i]] == ids[k[j]]), **positions)


SHAPES = [
    *((L, S), (1, S), (L, 1), (B, L, S), (1, L, S), (B, 1, S), (B * H, L, S), (B * H, 1, S)),
    *((B, H, L, S), (1, H, L, S), (B, 1, L, S), (B, 1, 1, S), (1, H, 1, 1)),
]


def pattern(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5


def entry(tensor: Tensor, b: int, h: int, i: int, j: int) -> float:
    """The number of a mask tensor that query i and key j of item b and head h get, by the rules of the docs."""
    first = {2: (), 3: (b,) if tensor.shape[0] in (1, B) else (b * H + h,), 4: (b, h)}[tensor.dim()]
    index = (*first, i, j)
    return tensor[tuple(0 if size == 1 else at for size, at in zip(tensor.shape, index, strict=True))].item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keep_and_drop_take_every_shape_with_opposite_meaning(shape: tuple[int, ...]) -> None:
    """A plain bool tensor is `keep`."""
    marks = pattern(shape)
    visible = table(lambda b, h, i, j: bool(entry(marks, b, h, i, j)))
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


PER_CELL, PER_KEY = pattern((B, H, L, S)), pattern((B, S))
LEAVES = [(param.values[0], param.values[1]) for param in POSITIONAL] + [
    (masks.keep(PER_CELL), lambda b, h, i, j: bool(PER_CELL[b, h, i, j])),
    (masks.drop(keys=PER_KEY), lambda b, h, i, j: not PER_KEY[b, j]),
]


def combined(parts: st.SearchStrategy[tuple[Mask, Rule]]) -> st.SearchStrategy[tuple[Mask, Rule]]:
    def both(left: tuple[Mask, Rule], right: tuple[Mask, Rule]) -> tuple[Mask, Rule]:
        return left[0] & right[0], lambda *at: left[1](*at) and right[1](*at)

    def either(left: tuple[Mask, Rule], right: tuple[Mask, Rule]) -> tuple[Mask, Rule]:
        return left[0] | right[0], lambda *at: left[1](*at) or right[1](*at)

    def opposite(part: tuple[Mask, Rule]) -> tuple[Mask, Rule]:
        return ~part[0], lambda *at: not part[1](*at)

    return st.one_of(st.builds(both, parts, parts), st.builds(either, parts, parts), st.builds(opposite, parts))


@given(st.recursive(st.sampled_from(LEAVES), combined, max_leaves=6))
def test_operators_are_boolean_algebra(pair: tuple[Mask, Rule]) -> None:
    mask, rule = pair
    assert_means(mask, table(rule))


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
