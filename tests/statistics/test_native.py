"""Statistics from the native kernel, on every instruction set: against the oracle and against float64 inputs."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead
from clearhead import AttentionStatistics, masks
from clearhead._statistics.definitions import STATISTICS
from clearhead._statistics.statistic import Statistic
from clearhead.kernels import _native_statistics
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
    statistics = _native_statistics.statistics

    def listening(call: Any, wanted: dict[str, Any], counted: Any) -> dict[str, Any]:
        asked.append(frozenset(wanted))
        return statistics(call, wanted, counted)

    monkeypatch.setattr(_native_statistics, "statistics", listening)
    return asked


@pytest.fixture(name="scores", params=["float32", "float64"])
def _scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Scores of short calls in float32, which have long ones, or in double precision."""
    if request.param == "float32":
        monkeypatch.setattr("clearhead.kernels._blocks.EXACT_KEYS", -1)
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


@on_every_set(
    {"name": [name for name in CASES if not name.startswith("dropout")]},
    {"map_pooling": ["mass", "max"], "scores": ["float32", "float64"]},
    indirect=["scores"],
)
def test_several_tiles_and_blocks(
    name: str, map_pooling: Literal["mass", "max"], instructions: str, scores: str, ran: list[frozenset[str]]
) -> None:
    """Every kind of mask, soft-cap, scale, sinks and grouped heads, as from float64."""
    close(numbers(CASES[name], torch.float32, map_pooling), exact_numbers(CASES[name], map_pooling))
    assert len(ran) == 1


@functools.lru_cache(maxsize=128)
def exact_numbers(case: Case, map_pooling: Literal["mass", "max"]) -> AttentionStatistics:
    return numbers(case, torch.float64, map_pooling)


def close(result: AttentionStatistics, exact: AttentionStatistics) -> None:
    for name in exact.names:
        if name == "top_k":
            assert torch.equal(result.top_k.indices >= 0, exact.top_k.indices >= 0)
            torch.testing.assert_close(result.top_k.weights.double(), exact.top_k.weights, rtol=0, atol=1e-6)
            continue
        rtol, atol = TOLERANCES.get(name, TOLERANCES["weights"])
        actual, expected = getattr(result, name).double(), getattr(exact, name).double()
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


LONG_MASKS = {"full": None, "causal": masks.causal("bottom_right"), "window": masks.sliding_window(97, 3)}


@on_every_set({"mask": LONG_MASKS}, {"dtype": [torch.float32, torch.bfloat16, torch.float16]})
def test_long_calls_run_natively(mask: str, dtype: torch.dtype, instructions: str, ran: list[frozenset[str]]) -> None:
    """Their output is that of `attention`, in its dtype and layout. Half precision is scored in float32."""
    length, count, rule = 53, 1031, LONG_MASKS[mask]
    query = torch.randn(2, length, 4, 16).to(dtype).transpose(1, 2)
    key, value, sinks = torch.randn(2, 2, count, 16).to(dtype), torch.randn(2, 2, count, 5).to(dtype), torch.randn(4)
    arguments: dict[str, Any] = {"mask": rule, "value": value, "sinks": sinks}
    result = clearhead.attention_statistics(query, key, **arguments, statistics=EVERY, top_k=11)
    visible = torch.ones(length, count, dtype=torch.bool) if rule is None else rule.dense(length, count)[0, 0]
    compare(result, Oracle(query, key, visible.expand(2, 4, length, count), value, sinks=sinks))
    output = clearhead.attention_statistics(query, key, **arguments, statistics=("output",)).output
    expected = clearhead.attention(query, key, value, rule, sinks=sinks)
    assert output.dtype == dtype
    assert output.stride() == expected.stride()
    if dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    else:
        torch.testing.assert_close(output, expected)
    assert len(ran) == 2


def test_a_row_that_is_not_a_number_stays_alone(instructions: str) -> None:
    query, key = torch.randn(1, 2, 101, 8), torch.randn(1, 2, 1031, 8)
    clean = clearhead.attention_statistics(query, key, statistics=("entropy", "confidence", "top_k"))
    query[0, 1, 17, 3] = torch.nan
    result = clearhead.attention_statistics(
        query, key, statistics=("entropy", "confidence", "top_k", "max_logit", "raw_max_logit")
    )
    rows = torch.arange(101) != 17
    assert result.entropy[0, 1, 17].isnan()
    assert result.confidence[0, 1, 17].isnan()
    assert result.max_logit.isnan().tolist() == [[False, True]]
    assert result.raw_max_logit.isnan().tolist() == [[False, True]]
    assert torch.equal(result.entropy[:, :, rows], clean.entropy[:, :, rows])
    assert torch.equal(result.top_k.indices[:, :, rows], clean.top_k.indices[:, :, rows])


@pytest.mark.parametrize("top_k", [1, 13, 64])
@pytest.mark.parametrize("order", ["equal", "rising", "falling"])
def test_top_k_of_ordered_scores(order: str, top_k: int, instructions: str) -> None:
    """Rising scores fill the list of top keys most often. Equal scores have different keys."""
    query, key = torch.ones(1, 1, 5, 1), torch.linspace(-3, 3, 2053)[None, None, :, None]
    key = {"equal": torch.zeros_like(key), "rising": key, "falling": key.flip(2)}[order]
    result = clearhead.attention_statistics(query, key, statistics=("top_k",), top_k=top_k)
    compare(result, Oracle(query, key, torch.ones(1, 1, 5, 2053, dtype=torch.bool)))
    assert bool((result.top_k.weights.diff(dim=-1) <= 0).all())


def test_blocks_compute_the_statistics_without_a_native_form(ran: list[frozenset[str]]) -> None:
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 1031, 4)
    both = clearhead.attention_statistics(query, key, statistics=("sink", "entropy", "top_k"), top_k=65, sink_keys=65)
    alone = clearhead.attention_statistics(query, key, statistics=("sink",), sink_keys=65)
    assert torch.equal(both.sink, alone.sink)
    assert ran == [{"entropy", "visible"}]
    placed = clearhead.attention_statistics(
        query, key, query_positions=torch.arange(5)[None], statistics=("distance", "offset", "entropy")
    )
    assert ran[1:] == [{"entropy", "visible"}], "distances between positions that are tensors"
    torch.testing.assert_close(
        placed.distance, clearhead.attention_statistics(query, key, statistics="distance").distance
    )
    del ran[:]
    clearhead.attention_statistics(query.double(), key.double(), statistics=NATIVE[:5])
    assert not ran, "float64 is scored in float64"


class _Squares(Statistic):
    """A statistic without a native form."""

    name = "squares"
    meaning = "Σ_j p_ij²"

    def add(self, rows: Any) -> None:
        self.put(self.accumulator, rows, rows.weights.square().sum(-1, keepdim=True))


@pytest.mark.parametrize("keys", [131, 1031], ids=["exact", "long"])
def test_a_new_statistic_is_computed_by_blocks_beside_the_others(
    keys: int, ran: list[frozenset[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATISTICS, "squares", _Squares)
    query, key, mask = torch.randn(2, 4, 53, 8), torch.randn(2, 2, keys, 8), masks.causal("bottom_right")
    names = ("entropy", "squares", "received", "rows")
    result = clearhead.attention_statistics(query, key, mask, statistics=names)
    assert ran == [{"entropy", "visible", "received", "viewers"}]
    squares = clearhead.attention_weights(query.double(), key.double(), mask).square().sum(-1)
    torch.testing.assert_close(result.squares.double(), squares, rtol=0, atol=1e-6)
    alone = clearhead.attention_statistics(query, key, mask, statistics=("entropy", "received", "rows"))
    for name in alone.names:
        assert torch.equal(getattr(result, name), getattr(alone, name)), name


def test_short_calls_are_as_exact_as_from_float64(instructions: str, ran: list[frozenset[str]]) -> None:
    """Scores reach 90. Rounding them to float32 would change weights by 4e-6."""
    query, key = 3 * torch.randn(2, 4, 201, 64), torch.randn(2, 2, 1024, 64)
    for softcap, bias in ((None, None), (30.0, None), (None, 30 * torch.randn(1, 4, 201, 1024))):
        mask = None if bias is None else masks.bias(bias)
        result = clearhead.attention_statistics(query, key, mask, softcap=softcap, statistics=("rows", "confidence"))
        exact = clearhead.attention_statistics(
            query.double(), key.double(), mask, softcap=softcap, statistics=("rows", "confidence")
        )
        for name in ("rows", "confidence"):
            torch.testing.assert_close(getattr(result, name).double(), getattr(exact, name), rtol=0, atol=6e-7)
    assert len(ran) == 3


@pytest.mark.parametrize("shift", [0, 7])
def test_places_count_from_the_first_query(shift: int, instructions: str, scores: str) -> None:
    query, key = torch.randn(1, 2, 61, 8), torch.randn(1, 2, 131, 8)
    result = clearhead.attention_statistics(
        query, key, query_positions=shift, statistics=("distance", "offset"), offsets=(-1, -200, 69, 130)
    )
    weights = clearhead.attention_weights(query.double(), key.double())
    rows, columns = torch.arange(61)[:, None] + shift, torch.arange(131)
    distance = (weights * (rows - columns).abs()).sum(-1)
    torch.testing.assert_close(result.distance.double(), distance, rtol=1e-5, atol=1e-5)
    for place, offset in enumerate((-1, -200, 69, 130)):
        diagonal = columns == rows + offset
        mean = (weights * diagonal).sum((-2, -1)) / max(int(diagonal.sum()), 1)
        torch.testing.assert_close(result.offset[..., place].double(), mean, rtol=0, atol=1e-6)


def test_a_hidden_key_at_an_offset_is_not_counted_and_a_weight_of_zero_is(instructions: str, scores: str) -> None:
    query, key = torch.ones(1, 1, 3, 1), torch.tensor([0.0, 500.0, 0.0])[None, None, :, None]
    visible = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 0]])[None].bool()
    result = clearhead.attention_statistics(
        query, key, visible, scale=1.0, statistics=("offset", "sink"), offsets=(0, -1)
    )
    assert result.offset[0, 0].tolist() == [0.5, 1.0]  # query 1 does not see key 0, so the second mean has query 2 only
    assert result.sink.tolist() == [[[0.0, 0.0, 0.0]]]


def test_the_same_bits_whatever_the_threads() -> None:
    query, key, value = torch.randn(2, 3, 499, 8), torch.randn(2, 3, 1031, 8), torch.randn(2, 3, 1031, 8)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(clearhead.attention_statistics(query, key, value=value, statistics=NATIVE))
    for other in results[1:]:
        for name in set(other.names) - {"top_k"}:
            assert torch.equal(getattr(other, name), getattr(results[0], name)), name
