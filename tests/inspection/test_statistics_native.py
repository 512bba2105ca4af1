"""Statistics from the native kernel, on every instruction set: against the oracle and against float64 inputs."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead
import clearhead._statistics.compute
import clearhead.kernels._blocks
from clearhead import masks
from clearhead._call.call import AttentionCall
from clearhead._statistics.definitions import STATISTICS
from clearhead._statistics.result import AttentionStatistics
from clearhead._statistics.statistic import Statistic
from clearhead.kernels._block_rows import BlockRows
from tests.support.calls import Call, calls
from tests.support.native import fewer_unless_best, needs_native, on_every_set, threads
from tests.support.native_cases import CASES, Case
from tests.support.statistics_oracle import EVERY, TOLERANCES, Oracle, compare

from .test_statistics import compare_generated

NATIVE = (*EVERY, "output")

pytestmark = needs_native


@pytest.fixture(name="ran")
def _ran(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """What the native kernel was asked for."""
    asked: list[frozenset[str]] = []
    gather = clearhead._statistics.compute.gather

    def listening(call: AttentionCall, wanted: dict[str, Any], *rest: Any, **options: Any) -> dict[str, Any]:
        asked.append(frozenset(wanted))
        return gather(call, wanted, *rest, **options)

    monkeypatch.setattr(clearhead._statistics.compute, "gather", listening)
    return asked


@pytest.fixture(name="scores", params=["float32", "float64"])
def _scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Scores of short calls in float32, which have long ones, or in double precision."""
    if request.param == "float32":
        monkeypatch.setattr(clearhead.kernels._blocks, "EXACT_KEYS", -1)
    return request.param


def test_generated_calls_equal_the_oracle(instructions: str, scores: str, ran: list[frozenset[str]]) -> None:
    total: list[Call] = []

    @fewer_unless_best(instructions)
    @given(calls(torch.float32), st.data())
    def run(call: Call, data: st.DataObject) -> None:
        total.append(call)
        compare_generated(call, data)

    run()
    assert len(ran) > len(total) / 2


def numbers(case: Case, dtype: torch.dtype, map_pooling: Literal["mass", "max"]) -> AttentionStatistics:
    counted = torch.rand(case.batch, case.length, generator=torch.Generator().manual_seed(3)) > 0.3
    inputs = {name: tensor.detach().to(dtype) for name, tensor in case.inputs().items()}
    mask = case.mask(case.batch, case.kv_heads * case.group, case.length, case.count)
    options: dict[str, Any] = {name: value for name, value in case.options.items() if name != "dropout_p"}
    return clearhead.attention_statistics(
        inputs["query"],
        inputs["key"],
        mask,
        value=inputs["value"],
        sinks=inputs.get("sinks"),
        query_mask=counted,
        statistics=(*NATIVE, "rows"),
        queries=[case.length - 1, *range(0, case.length, 7), 0],
        map_size=29,
        sink_keys=3,
        offsets=(-1, 0, 5, -37, 10_000),
        map_pooling=map_pooling,
        **options,
    )


@on_every_set({"name": [name for name in CASES if not name.startswith("dropout")]}, {"map_pooling": ["mass", "max"]})
def test_several_tiles_and_blocks(
    name: str, map_pooling: Literal["mass", "max"], instructions: str, scores: str, ran: list[frozenset[str]]
) -> None:
    """Every kind of mask, soft-cap, scale, sinks and grouped heads, as from float64."""
    close(numbers(CASES[name], torch.float32, map_pooling), exact_numbers(CASES[name], map_pooling))
    assert len(ran) == 1


@functools.lru_cache(maxsize=128)
def exact_numbers(case: Case, map_pooling: Literal["mass", "max"]) -> AttentionStatistics:
    return numbers(case, torch.float64, map_pooling)


def close(found: AttentionStatistics, exact: AttentionStatistics) -> None:
    for name in exact.names:
        if name == "top_k":
            assert torch.equal(found.top_k.indices >= 0, exact.top_k.indices >= 0)
            torch.testing.assert_close(found.top_k.weights.double(), exact.top_k.weights, rtol=0, atol=1e-6)
            continue
        rtol, atol = TOLERANCES.get(name, TOLERANCES["weights"])
        expected = getattr(exact, name).double()
        torch.testing.assert_close(
            getattr(found, name).double(), expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "mask", [None, masks.causal("bottom_right"), masks.sliding_window(97, 3)], ids=["full", "causal", "window"]
)
def test_long_calls_run_natively(mask: masks.Mask | None, instructions: str, ran: list[frozenset[str]]) -> None:
    query, key, value = torch.randn(2, 4, 53, 16), torch.randn(2, 2, 1031, 16), torch.randn(2, 2, 1031, 5)
    found = clearhead.attention_statistics(query, key, mask, value=value, statistics=NATIVE, top_k=11)
    visible = torch.ones(53, 1031, dtype=torch.bool)
    if mask is not None:
        visible = mask.dense(53, 1031)[0, 0]
    compare(found, Oracle(query, key, visible.expand(2, 4, 53, 1031), value))
    assert len(ran) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_inputs_are_scored_in_float32(dtype: torch.dtype, instructions: str, ran: list[frozenset[str]]) -> None:
    query, key, value = torch.randn(1, 4, 71, 16), torch.randn(1, 2, 1153, 16), torch.randn(1, 2, 1153, 16)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    found = clearhead.attention_statistics(query, key, value=value, statistics=EVERY)
    compare(found, Oracle(query, key, torch.ones(1, 4, 71, 1153, dtype=torch.bool), value))
    output = clearhead.attention_statistics(query, key, value=value, statistics=("output",)).output
    torch.testing.assert_close(output, clearhead.attention(query, key, value))
    assert output.dtype == dtype
    assert len(ran) == 2


def test_the_output_is_that_of_attention(instructions: str, ran: list[frozenset[str]]) -> None:
    query = torch.randn(2, 211, 4, 16).transpose(1, 2)
    key, value = torch.randn(2, 2, 1031, 16), torch.randn(2, 2, 1031, 7)
    sinks = torch.randn(4)
    found = clearhead.attention_statistics(
        query, key, masks.causal(), value=value, sinks=sinks, statistics=("output", "entropy")
    )
    expected = clearhead.attention(query, key, value, masks.causal(), sinks=sinks)
    torch.testing.assert_close(found.output, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert found.output.stride() == expected.stride()
    assert len(ran) == 1


def test_a_row_that_is_not_a_number_stays_alone(instructions: str) -> None:
    query, key = torch.randn(1, 2, 101, 8), torch.randn(1, 2, 1031, 8)
    clean = clearhead.attention_statistics(query, key, statistics=("entropy", "confidence", "top_k"))
    query[0, 1, 17, 3] = torch.nan
    found = clearhead.attention_statistics(
        query, key, statistics=("entropy", "confidence", "top_k", "max_logit", "raw_max_logit")
    )
    rows = torch.arange(101) != 17
    assert found.entropy[0, 1, 17].isnan()
    assert found.confidence[0, 1, 17].isnan()
    assert found.max_logit.isnan().tolist() == [[False, True]]
    assert found.raw_max_logit.isnan().tolist() == [[False, True]]
    assert torch.equal(found.entropy[:, :, rows], clean.entropy[:, :, rows])
    assert torch.equal(found.top_k.indices[:, :, rows], clean.top_k.indices[:, :, rows])


@pytest.mark.parametrize("top_k", [1, 8, 64])
def test_equal_scores_name_different_keys(top_k: int, instructions: str) -> None:
    query, key = torch.zeros(1, 2, 3, 8), torch.randn(1, 2, 1031, 8)
    found = clearhead.attention_statistics(query, key, statistics=("top_k",), top_k=top_k)
    compare(found, Oracle(query, key, torch.ones(1, 2, 3, 1031, dtype=torch.bool)))


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_top_k_of_sorted_scores(order: str, instructions: str) -> None:
    """The largest scores all lie in one piece, and they come in the order that fills the lists most often."""
    query, key = torch.ones(1, 1, 5, 1), torch.linspace(-3, 3, 2053)[None, None, :, None]
    key = key if order == "rising" else key.flip(2)
    found = clearhead.attention_statistics(query, key, statistics=("top_k",), top_k=13)
    compare(found, Oracle(query, key, torch.ones(1, 1, 5, 2053, dtype=torch.bool)))
    assert bool((found.top_k.weights.diff(dim=-1) <= 0).all())


def test_sharp_rows_name_keys_whose_weight_is_zero(instructions: str) -> None:
    query, key = torch.randn(1, 2, 17, 8), torch.randn(1, 2, 1031, 8)
    found = clearhead.attention_statistics(query, key, scale=1e4, value=key, statistics=NATIVE)
    assert found.top_k.indices.ge(0).all()
    assert found.entropy.isfinite().all()
    assert found.entropy.ge(0).all()
    assert found.normalized_entropy.le(1).all()


def test_what_is_left_stays_with_python(ran: list[frozenset[str]]) -> None:
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 1031, 4)
    both = clearhead.attention_statistics(query, key, statistics=("sink", "entropy", "top_k"), top_k=65, sink_keys=65)
    alone = clearhead.attention_statistics(query, key, statistics=("sink",), sink_keys=65)
    assert torch.equal(both.sink, alone.sink)
    assert ran == [frozenset({"entropy"})]
    placed = clearhead.attention_statistics(
        query, key, query_positions=torch.arange(5)[None], statistics=("distance", "offset", "entropy")
    )
    assert ran[1:] == [frozenset({"entropy"})], "distances between positions that are tensors"
    torch.testing.assert_close(
        placed.distance, clearhead.attention_statistics(query, key, statistics="distance").distance
    )
    del ran[:]
    clearhead.attention_statistics(query.double(), key.double(), statistics=NATIVE[:5])
    assert not ran, "float64 is scored in float64"


class _Squares(Statistic):
    """A statistic that nobody wrote a native form for."""

    name = "squares"
    meaning = "Σ_j p_ij²"

    def add(self, rows: BlockRows) -> None:
        self.put(self.accumulator, rows, rows.weights.square().sum(-1, keepdim=True))


@pytest.mark.parametrize("keys", [131, 1031], ids=["exact", "long"])
def test_one_without_a_native_form_is_computed_by_blocks_beside_the_others(
    keys: int, ran: list[frozenset[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATISTICS, "squares", _Squares)
    query, key, mask = torch.randn(2, 4, 53, 8), torch.randn(2, 2, keys, 8), masks.causal("bottom_right")
    names = ("entropy", "squares", "received", "rows")
    found = clearhead.attention_statistics(query, key, mask, statistics=names)
    assert ran == [{"entropy", "received", "viewers"}]
    squares = clearhead.attention_weights(query.double(), key.double(), mask).square().sum(-1)
    torch.testing.assert_close(found.squares.double(), squares, rtol=0, atol=1e-6)
    alone = clearhead.attention_statistics(query, key, mask, statistics=("entropy", "received", "rows"))
    for name in alone.names:
        assert torch.equal(getattr(found, name), getattr(alone, name)), name
    shared = clearhead.attention_statistics(query, key, mask, statistics=names[:2], per="kv_head").squares
    torch.testing.assert_close(shared.double(), squares.unflatten(1, (2, 2)).mean(2), rtol=0, atol=1e-6)


def test_short_calls_are_as_exact_as_from_float64(instructions: str, ran: list[frozenset[str]]) -> None:
    """Scores up to 90, whose rounding in float32 alone would be 4e-6 of a weight."""
    query, key = 3 * torch.randn(2, 4, 201, 64), torch.randn(2, 2, 1024, 64)
    for softcap, bias in ((None, None), (30.0, None), (None, 30 * torch.randn(1, 4, 201, 1024))):
        mask = None if bias is None else masks.bias(bias)
        found = clearhead.attention_statistics(query, key, mask, softcap=softcap, statistics=("rows", "confidence"))
        exact = clearhead.attention_statistics(
            query.double(), key.double(), mask, softcap=softcap, statistics=("rows", "confidence")
        )
        for name in ("rows", "confidence"):
            torch.testing.assert_close(getattr(found, name).double(), getattr(exact, name), rtol=0, atol=6e-7)
    assert len(ran) == 3


@pytest.mark.parametrize("shift", [0, 7])
def test_places_count_from_the_first_query(shift: int, instructions: str, scores: str) -> None:
    query, key = torch.randn(1, 2, 61, 8), torch.randn(1, 2, 131, 8)
    found = clearhead.attention_statistics(
        query, key, query_positions=shift, statistics=("distance", "offset"), offsets=(-1, -200, 69, 130)
    )
    weights = clearhead.attention_weights(query.double(), key.double())
    rows, columns = torch.arange(61)[:, None] + shift, torch.arange(131)
    distance = (weights * (rows - columns).abs()).sum(-1)
    torch.testing.assert_close(found.distance.double(), distance, rtol=1e-5, atol=1e-5)
    for place, offset in enumerate((-1, -200, 69, 130)):
        there = columns == rows + offset
        mean = (weights * there).sum((-2, -1)) / max(int(there.sum()), 1)
        torch.testing.assert_close(found.offset[..., place].double(), mean, rtol=0, atol=1e-6)


def test_a_hidden_key_at_an_offset_is_not_counted_and_a_weight_of_zero_is(instructions: str, scores: str) -> None:
    query, key = torch.ones(1, 1, 3, 1), torch.tensor([0.0, 500.0, 0.0])[None, None, :, None]
    visible = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 0]])[None].bool()
    found = clearhead.attention_statistics(
        query, key, visible, scale=1.0, statistics=("offset", "sink"), offsets=(0, -1)
    )
    assert found.offset[0, 0].tolist() == [0.5, 1.0]  # (0, 1) and (2 → 1 alone: 1 does not see 0)
    assert found.sink.tolist() == [[[0.0, 0.0, 0.0]]]


def test_the_same_bits_whatever_the_threads() -> None:
    query, key, value = torch.randn(2, 3, 499, 8), torch.randn(2, 3, 1031, 8), torch.randn(2, 3, 1031, 8)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(clearhead.attention_statistics(query, key, value=value, statistics=NATIVE))
    for other in results[1:]:
        for name in set(other.names) - {"top_k"}:
            assert torch.equal(getattr(other, name), getattr(results[0], name)), name
