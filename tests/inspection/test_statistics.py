"""`attention_statistics` against a float64 oracle that builds the whole (B, H, L, S) tensors."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError
from tests.support.calls import Call, calls
from tests.support.statistics_oracle import EVERY, Oracle, compare

EXACT = {torch.float64: 1e-10, torch.float32: None}


def oracle_of(call: Call, counted: Tensor | None) -> Oracle:
    """The generated call with its mask as tensors, asked of plain Python rules."""
    problem = call.problem
    batch, heads, length, _ = call.query.shape
    count = call.key.shape[2]
    shape = (batch, heads, length, count)
    rule = [
        problem.rule(b, h, i, j)
        for b in range(batch)
        for h in range(heads)
        for i in range(length)
        for j in range(count)
    ]
    visible = torch.tensor(rule, dtype=torch.bool).reshape(shape)
    bias = torch.zeros(shape, dtype=torch.float64)
    for table in problem.biases:
        if table.dim() == 3:
            table = table[:, None] if table.shape[0] in (1, batch) else table.reshape(batch, heads, *table.shape[1:])
        bias = bias + table.detach().double()
    visible = visible & (bias > -torch.inf)
    return Oracle(
        call.query,
        call.key,
        visible,
        call.value,
        bias,
        problem.scale,
        problem.softcap,
        problem.sinks,
        counted,
        _two_dimensional(call.options.get("query_positions")),
        _two_dimensional(call.options.get("key_positions")),
    )


def _two_dimensional(positions: Tensor | None) -> Tensor | None:
    return positions if positions is None or positions.dim() == 2 else positions[None]


def compare_generated(call: Call, data: st.DataObject) -> None:
    batch, _, length, _ = call.query.shape
    counted = None
    if data.draw(st.booleans()):
        marks = data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length))
        counted = torch.tensor(marks, dtype=torch.bool).reshape(batch, length)
    options = {
        "top_k": data.draw(st.sampled_from([1, 3, 20])),
        "map_size": data.draw(st.sampled_from([1, 3, 128])),
        "map_pooling": data.draw(st.sampled_from(["mass", "max"])),
        "sink_keys": data.draw(st.sampled_from([1, 2, 30])),
        "offsets": data.draw(st.sampled_from([(-1,), (0, 2, -3), (40, -40)])),
    }
    found = clearhead.attention_statistics(
        *call.weights_arguments,
        **call.weights_options,
        **options,
        value=call.value,
        statistics=EVERY,
        query_mask=counted,
    )
    compare(found, oracle_of(call, counted), exact=EXACT[call.query.dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_statistic_equals_the_oracle(dtype: torch.dtype) -> None:
    @given(calls(dtype), st.data())
    def run(call: Call, data: st.DataObject) -> None:
        compare_generated(call, data)

    run()


def test_every_statistic_equals_the_oracle_in_many_blocks(small_blocks: None) -> None:
    @given(calls(torch.float64), st.data())
    def run(call: Call, data: st.DataObject) -> None:
        compare_generated(call, data)

    run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_half_inputs_are_scored_in_float32(dtype: torch.dtype, mask: masks.Mask | None) -> None:
    """Compared with float64 from the same rounded query and key."""
    query, key, value = (torch.randn(2, heads, 71, 16).to(dtype) for heads in (4, 2, 2))
    found = clearhead.attention_statistics(query, key, mask, value=value, statistics=EVERY)
    visible = torch.ones(2, 4, 71, 71, dtype=torch.bool)
    compare(found, Oracle(query, key, visible if mask is None else visible.tril(), value))
    assert found.entropy.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_output_is_that_of_attention(dtype: torch.dtype) -> None:
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 3)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    found = clearhead.attention_statistics(query, key, masks.causal(), value=value, statistics=("output",))
    torch.testing.assert_close(found.output, clearhead.attention(query, key, value, masks.causal()))
    assert found.output.dtype == dtype


def test_autocast_rounds_the_inputs_and_nothing_else() -> None:
    query, key = torch.randn(2, 3, 37, 16), torch.randn(2, 3, 41, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = clearhead.attention_statistics(query, key, statistics=("entropy", "received", "max_logit", "top_k"))
    compare(found, Oracle(query.bfloat16(), key.bfloat16(), torch.ones(2, 3, 37, 41, dtype=torch.bool)))


@pytest.mark.parametrize("count", [63, 64, 65, 513, 577, 1031], ids=lambda count: f"S={count}")
@pytest.mark.parametrize("top_k", [1, 8, 16])
@pytest.mark.parametrize("hidden", ["nothing", "future", "tail", "most"])
def test_top_k_of_many_keys(count: int, top_k: int, hidden: str) -> None:
    """Groups of keys are ranked first; the last group is a part of one, and whole groups may be hidden."""
    length = 5
    query, key = torch.randn(1, 4, length, 8), torch.randn(1, 2, count, 8)
    visible = torch.ones(length, count, dtype=torch.bool)
    if hidden == "future":
        visible = visible.tril(count // 2)
    if hidden == "tail":
        visible[:, count // 3 :] = False
    if hidden == "most":
        visible &= torch.arange(count) % 61 == 3
        visible[2] = False
    found = clearhead.attention_statistics(query, key, visible, statistics=("top_k",), top_k=top_k)
    compare(found, Oracle(query, key, visible.expand(1, 4, length, count)))


def test_top_k_of_equal_weights_names_different_keys() -> None:
    query, key = torch.zeros(1, 2, 3, 8), torch.randn(1, 2, 1000, 8)
    found = clearhead.attention_statistics(query, key, statistics=("top_k",), top_k=12)
    compare(found, Oracle(query, key, torch.ones(1, 2, 3, 1000, dtype=torch.bool)))


@pytest.mark.parametrize("sizes", [(0, 3), (1, 3), (3, 0), (3, 1), (0, 0), (1, 1)], ids=lambda s: f"L={s[0]} S={s[1]}")
@pytest.mark.parametrize("mask", [None, masks.causal("bottom_right")], ids=["full", "causal"])
def test_few_queries_or_keys(sizes: tuple[int, int], mask: masks.Mask | None) -> None:
    length, count = sizes
    query, key, value = torch.randn(2, 4, length, 5), torch.randn(2, 2, count, 5), torch.randn(2, 2, count, 3)
    found = clearhead.attention_statistics(query, key, mask, value=value, statistics=EVERY)
    visible = torch.ones(2, 4, length, count, dtype=torch.bool)
    compare(found, Oracle(query, key, visible if mask is None else visible.tril(count - length), value))


def test_an_empty_batch() -> None:
    query = torch.zeros(0, 2, 5, 3)
    found = clearhead.attention_statistics(query, query, value=query, statistics=EVERY)
    assert found.entropy.shape == (0, 2, 5)
    assert found.top_k.indices.shape == (0, 2, 5, 5)


def test_hidden_queries_have_no_weight_no_entropy_and_are_counted_apart() -> None:
    query, key = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7)
    visible = torch.rand(2, 3, 5, 11) > 0.3
    visible[0, 1, 2] = visible[1, 2, 0] = visible[1, 2, 4] = False
    found = clearhead.attention_statistics(query, key, visible, value=key, statistics=EVERY)
    assert found.hidden_queries.tolist() == [[0, 1, 0], [0, 0, 2]]
    for name in ("entropy", "normalized_entropy", "confidence", "sink", "distance", "output_norm"):
        assert getattr(found, name)[0, 1, 2] == 0, name
    assert found.top_k.indices[1, 2, 4].eq(-1).all()
    compare(found, Oracle(query, key, visible, key))


def test_the_raw_logit_is_before_soft_cap_and_bias() -> None:
    """q·k of 400 under a soft-cap that no float32 tanh tells from 1; larger products are masked, by −∞ too."""
    query, key = torch.ones(1, 1, 1, 4), torch.tensor([1.0, 100.0, 300.0, 500.0])[:, None].expand(4, 4)[None, None]
    bias = masks.bias(torch.tensor([[7.0, -9.0, -torch.inf, 0.0]])) & masks.lengths(torch.tensor([3]))
    found = clearhead.attention_statistics(
        query, key, bias, scale=1.0, softcap=2.0, statistics=("max_logit", "raw_max_logit")
    )
    assert found.raw_max_logit.tolist() == [[400.0]]
    assert found.max_logit.item() == pytest.approx(2 * math.tanh(2) + 7)


@pytest.mark.parametrize("scale", [60.0, 1e4], ids=str)
def test_sharp_rows(scale: float) -> None:
    """Weights that round to 0 and 1 give finite entropies, never below zero."""
    query, key = torch.randn(1, 2, 17, 8), torch.randn(1, 2, 67, 8)
    found = clearhead.attention_statistics(query, key, scale=scale, value=key, statistics=EVERY)
    for name in found.names:
        if name not in ("top_k", "sees"):
            assert getattr(found, name).isfinite().all(), name
    assert found.entropy.ge(0).all()
    assert found.normalized_entropy.le(1).all()
    exact = clearhead.attention_statistics(query.double(), key.double(), scale=scale, statistics=("entropy",))
    oracle = Oracle(query, key, torch.ones(1, 2, 17, 67, dtype=torch.bool), scale=scale)
    torch.testing.assert_close(exact.entropy, oracle.entropy(), rtol=0, atol=1e-9)


def test_query_mask_as_numbers_and_on_columns_only() -> None:
    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 5, 8)
    counted = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    found = clearhead.attention_statistics(query, key, value=key, query_mask=counted, statistics=EVERY)
    compare(found, Oracle(query, key, torch.ones(2, 4, 7, 5, dtype=torch.bool), key, counted=counted))
    everything = clearhead.attention_statistics(query, key, statistics=("entropy", "confidence"))
    torch.testing.assert_close(found.entropy, everything.entropy)
    assert found.counted.tolist() == counted.bool().tolist()


def test_per_key_value_head_is_the_mean_of_its_query_heads() -> None:
    query, key, value = torch.randn(2, 6, 7, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 3)
    names = tuple(name for name in EVERY if name != "top_k")
    each = clearhead.attention_statistics(query, key, value=value, statistics=names)
    reduced = clearhead.attention_statistics(query, key, value=value, statistics=names, per="kv_head")
    for name in each.names:
        if name in ("sees", "hidden_queries", "head_average"):
            continue
        expected = getattr(each, name).unflatten(1, (2, 3)).mean(2)
        torch.testing.assert_close(getattr(reduced, name), expected, msg=name)
    torch.testing.assert_close(reduced.head_average, each.head_average)
    assert (reduced.num_heads, reduced.num_kv_heads) == (6, 2)


@pytest.mark.parametrize("statistic", ["top_k", "rows", "output"])
def test_what_has_no_mean_over_heads(statistic: str) -> None:
    query = torch.randn(1, 4, 3, 8)
    key = query[:, :2]
    with pytest.raises(
        ArgumentError, match=rf"per: expected 'query_head' for {statistic}, which has no.*, got 'kv_head'"
    ):
        clearhead.attention_statistics(query, key, value=key, statistics=("entropy", statistic), per="kv_head")


def test_per_takes_two_words() -> None:
    query = torch.randn(1, 4, 3, 8)
    with pytest.raises(ArgumentError, match=r"per: expected .*'query_head'.*'kv_head'.*, got 'head'"):
        clearhead.attention_statistics(query, query, statistics=("entropy",), per="head")  # type: ignore[arg-type]


def test_chosen_rows_are_exact_weights() -> None:
    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 5, 8)
    visible = torch.rand(7, 5) > 0.2
    found = clearhead.attention_statistics(query, key, visible, statistics=("rows",), queries=[4, -1])
    expected = Oracle(query, key, visible.expand(2, 4, 7, 5)).p[:, :, [4, 6]]
    torch.testing.assert_close(found.rows.double(), expected, rtol=0, atol=1e-6)


def test_without_a_batch() -> None:
    query, key, value = torch.randn(4, 7, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 3)
    found = clearhead.attention_statistics(query, key, value=value, statistics=EVERY)
    compare(found, Oracle(query[None], key[None], torch.ones(1, 4, 7, 5, dtype=torch.bool), value[None]))


def test_no_gradient_is_recorded() -> None:
    query, key = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 5, 4, requires_grad=True)
    found = clearhead.attention_statistics(query, key, value=key, statistics=(*EVERY, "rows"))
    tensors = [*(found.results[name] for name in found.names if name != "top_k"), *found.top_k]
    assert not any(tensor.requires_grad for tensor in tensors)


def test_only_what_was_asked_for_is_there() -> None:
    query = torch.randn(1, 2, 5, 4)
    found = clearhead.attention_statistics(query, query, statistics=("entropy",))
    assert repr(found).startswith("AttentionStatistics(entropy, normalized_entropy")
    with pytest.raises(AttributeError, match=r"received: not among the statistics.*statistics=\('received', \.\.\.\)"):
        _ = found.received
    assert not hasattr(found, "__array__")


@pytest.mark.parametrize("args", [(), ({},), ((3, 3, 7), torch.ones(2, 5), {}, None, "query_head")])
def test_the_class_is_not_for_users_to_call(args: tuple[object, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"AttentionStatistics\(\.\.\.\): .*clearhead\.attention_statistics"):
        clearhead.AttentionStatistics(*args)


def test_statistics_can_be_copied_and_pickled() -> None:
    query = torch.randn(2, 3, 5, 7)
    found = clearhead.attention_statistics(query, query, statistics=("entropy",))
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert repr(other) == repr(found)
        assert torch.equal(other.entropy, found.entropy)
