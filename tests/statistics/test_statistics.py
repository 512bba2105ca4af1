"""`attention_statistics` against a float64 oracle that builds the whole (B, H, L, S) tensors."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from benchmarks.memory import growth_of_peak, in_a_process
from clearhead import Mass, masks
from clearhead._statistics import definitions
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from tests.support.allocations import Allocations
from tests.support.budgets import in_turn
from tests.support.calls import Call, calls
from tests.support.native import FLOAT_SETS, use_instruction_set
from tests.support.statistics_oracle import EVERY, Oracle, compare

from ..kernels.adversarial import Adversary

EXACT = {torch.float64: 1e-10, torch.float32: None}


def visible(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def oracle_of(call: Call, counted: Tensor | None) -> Oracle:
    """The generated call with its mask as tensors, asked of plain Python rules."""
    problem = call.problem
    batch, heads, length, _ = call.query.shape
    count = call.key.shape[2]
    shape = (batch, heads, length, count)
    places = itertools.product(range(batch), range(heads), range(length), range(count))
    visible = torch.tensor([problem.rule(*place) for place in places], dtype=torch.bool).reshape(shape)
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
    result = clearhead.attention_statistics(
        *call.weights_arguments,
        **call.weights_options,
        **options,
        value=call.value,
        statistics=EVERY,
        query_mask=counted,
    )
    compare(result, oracle_of(call, counted), exact=EXACT[call.query.dtype])


@pytest.mark.parametrize(("dtype", "blocks"), [(torch.float32, "few"), (torch.float64, "many")])
def test_every_statistic_equals_the_oracle(dtype: torch.dtype, blocks: str, request: pytest.FixtureRequest) -> None:
    if blocks == "many":
        request.getfixturevalue("small_blocks")

    @given(calls(dtype), st.data())
    def run(call: Call, data: st.DataObject) -> None:
        compare_generated(call, data)

    run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_dtypes(dtype: torch.dtype, mask: masks.Mask | None) -> None:
    """Half precision is scored in float32, and compared with float64 from the same rounded query and key."""
    query, key, value = (torch.randn(2, heads, 71, 16).to(dtype) for heads in (4, 2, 2))
    result = clearhead.attention_statistics(query, key, mask, value=value, statistics=(*EVERY, "output"))
    torch.testing.assert_close(result.output, clearhead.attention(query, key, value, mask))
    everything = visible(2, 4, 71, 71)
    del result.results["output"]  # in the dtype of the inputs, unlike the oracle's
    compare(result, Oracle(query, key, everything if mask is None else everything.tril(), value))
    assert result.entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_autocast_rounds_the_inputs_and_nothing_else() -> None:
    query, key = torch.randn(2, 3, 37, 16), torch.randn(2, 3, 41, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = clearhead.attention_statistics(query, key, statistics=("entropy", "received", "max_logit", "top_k"))
    compare(result, Oracle(query.bfloat16(), key.bfloat16(), visible(2, 3, 37, 41)))


@pytest.mark.parametrize("count", [63, 64, 65, 577, 1031], ids=lambda count: f"S={count}")
@pytest.mark.parametrize("hidden", ["nothing", "future", "tail", "most", "equal"])
def test_top_k_of_many_keys(count: int, hidden: str) -> None:
    """Groups of 64 keys are ranked first. The last group may be short, and the mask may hide full groups."""
    length = 5
    query, key = torch.randn(1, 4, length, 8).double(), torch.randn(1, 2, count, 8).double()
    seen = visible(length, count)
    if hidden == "future":
        seen = seen.tril(count // 2)
    if hidden == "tail":
        seen[:, count // 3 :] = False
    if hidden == "most":
        seen &= torch.arange(count) % 61 == 3
        seen[2] = False
    if hidden == "equal":
        query = torch.zeros_like(query)
    for top_k in (1, 8, 16):
        result = clearhead.attention_statistics(query, key, seen, statistics=("top_k",), top_k=top_k)
        compare(result, Oracle(query, key, seen.expand(1, 4, length, count)), exact=1e-10)


def test_the_raw_logit_is_before_soft_cap_and_bias() -> None:
    """q·k of 400 under a soft-cap that no float32 tanh tells from 1; larger products are masked, by −∞ too."""
    query, key = torch.ones(1, 1, 1, 4), torch.tensor([1.0, 100.0, 300.0, 500.0])[:, None].expand(4, 4)[None, None]
    bias = masks.bias(torch.tensor([[7.0, -9.0, -torch.inf, 0.0]])) & masks.lengths(torch.tensor([3]))
    result = clearhead.attention_statistics(
        query, key, bias, scale=1.0, softcap=2.0, statistics=("max_logit", "raw_max_logit")
    )
    assert result.raw_max_logit.tolist() == [[400.0]]
    assert result.max_logit.item() == pytest.approx(2 * math.tanh(2) + 7)


def test_query_mask_as_numbers_and_on_columns_only() -> None:
    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 5, 8)
    counted = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    result = clearhead.attention_statistics(query, key, value=key, query_mask=counted, statistics=EVERY)
    compare(result, Oracle(query, key, visible(2, 4, 7, 5), key, counted=counted))
    everything = clearhead.attention_statistics(query, key, statistics=("entropy", "confidence"))
    torch.testing.assert_close(result.entropy, everything.entropy)
    assert result.counted.tolist() == counted.bool().tolist()


def test_per_key_value_head_is_the_mean_of_its_query_heads() -> None:
    query, key, value = torch.randn(2, 6, 7, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 3)
    names = tuple(name for name in EVERY if definitions.STATISTICS[name].averaged)
    each = clearhead.attention_statistics(query, key, value=value, statistics=names)
    reduced = clearhead.attention_statistics(query, key, value=value, statistics=names, per="kv_head")
    for name in each.names:
        if name in ("sees", "head_average"):
            continue
        expected = getattr(each, name).unflatten(1, (2, 3)).mean(2)
        torch.testing.assert_close(getattr(reduced, name), expected, msg=name)
    torch.testing.assert_close(reduced.head_average, each.head_average)
    assert (reduced.num_heads, reduced.num_kv_heads) == (6, 2)


def test_without_a_batch_and_without_gradients() -> None:
    shapes = ((4, 7, 8), (2, 5, 8), (2, 5, 3))
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    result = clearhead.attention_statistics(query, key, value=value, statistics=(*EVERY, "rows"))
    compare(result, Oracle(query[None], key[None], visible(1, 4, 7, 5), value[None]))
    tensors = [*(result.results[name] for name in result.names if name != "top_k"), *result.top_k]
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("batch", [0, 2])
def test_copies_have_the_chosen_statistics(batch: int) -> None:
    query = torch.randn(batch, 3, 5, 7)
    result = clearhead.attention_statistics(query, query, value=query, statistics=EVERY)
    for other in (copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert repr(other) == repr(result)
        assert torch.equal(other.entropy, result.entropy)
        assert other.top_k.indices.shape == (batch, 3, 5, 5)
        with pytest.raises(AttributeError, match=r"rows: not among the statistics.*statistics=\('rows', \.\.\.\)"):
            _ = other.rows
        assert not hasattr(other, "__array__")


#: Error, text and arguments. `tests/malformed` has others.
REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ArgumentError, "statistics: expected names among entropy, .*got 'mean'", {"statistics": "mean"}),
    (ArgumentError, "statistics: expected value= for 'output_norm'", {"statistics": "output_norm"}),
    (ArgumentError, "top_k: expected an int ≥ 1, got True", {"top_k": True}),
    (ArgumentError, "map_pooling: expected 'mass' or 'max', got 'mean'", {"map_pooling": "mean"}),
    (ArgumentError, "per: expected .*'query_head'.*'kv_head'.*, got 'head'", {"per": "head", "statistics": "entropy"}),
    (DTypeError, "query_mask: expected a bool or 0/1", {"query_mask": torch.ones(1, 5)}),
    (ShapeError, r"query_mask: expected \(B, L\) = \(1, 5\), got \(5, 1\)", {"query_mask": visible(5, 1)}),
    (ArgumentError, "row numbers below L = 5", {"statistics": ("rows",), "queries": [7]}),
]
PER_KV_HEAD = {"per": "kv_head", "value": torch.randn(1, 2, 5, 4)}
REFUSED += [
    (ArgumentError, f"per: expected 'query_head' for {name}, which has no", {"statistics": name} | PER_KV_HEAD)
    for name in ("top_k", "rows", "output")
]


@pytest.mark.parametrize(("kind", "text", "arguments"), REFUSED)
def test_refused(kind: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(kind, match=text):
        clearhead.attention_statistics(query, query, **arguments)


@pytest.mark.parametrize("args", [(), ((3, 3, 7), torch.ones(2, 5), {}, None)])
def test_the_class_cannot_be_called(args: tuple[object, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"AttentionStatistics\(\.\.\.\): .*clearhead\.attention_statistics"):
        clearhead.AttentionStatistics(*args)


# Errors of statistics do not grow with the length, on inputs whose rounding errors add up.


STATISTICS = ("entropy", "received", "confidence", "map", "output", "output_norm", "head_average", "top_k")


@pytest.fixture(name="path", params=["blocks", *FLOAT_SETS])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Statistics block by block in PyTorch, and from the native kernel on each instruction set of this machine."""
    if request.param == "blocks":
        monkeypatch.setattr("clearhead.kernels._native_support.extension", None)
        yield "blocks"
        return
    with use_instruction_set(request.param):
        yield request.param


def gathered(case: Adversary, dtype: torch.dtype) -> dict[str, Tensor]:
    query, key, value, _ = (x.to(dtype) for x in case.inputs())
    result = clearhead.attention_statistics(
        query, key, value=value, scale=case.scale * case.dim**-0.5, statistics=STATISTICS, map_size=4
    )
    results = {name: getattr(result, name) for name in STATISTICS if name != "top_k"}
    return {**results, "top weights": result.top_k.weights}


def test_sharp_rows(path: str) -> None:
    """Weights that round to 0 and 1 have finite entropies, which are never negative."""
    dtype = torch.float64 if path == "blocks" else torch.float32
    query, key = torch.randn(1, 2, 17, 8, dtype=dtype), torch.randn(1, 2, 1031, 8, dtype=dtype)
    for scale in (60.0, 1e4):
        result = clearhead.attention_statistics(query, key, scale=scale, value=key, statistics=(*EVERY, "output"))
        for name in result.names:
            if name not in ("top_k", "sees"):
                assert getattr(result, name).isfinite().all(), name
        assert result.top_k.indices.ge(0).all()
        assert result.entropy.ge(0).all()
        assert result.normalized_entropy.le(1).all()
        if dtype == torch.float64:
            oracle = Oracle(query, key, visible(1, 2, 17, 1031), scale=scale)
            torch.testing.assert_close(result.entropy, oracle.entropy(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [(8209, 1031), (5, 32768)], ids=str)
@pytest.mark.parametrize("keys", ["equal", "rising"])
def test_errors_stay_below_the_tolerance(keys: str, size: tuple[int, int], path: str) -> None:
    case = Adversary(keys, "equal", *size)
    exact = gathered(case, torch.float64)
    for name, result in gathered(case, torch.float32).items():
        error, largest = (result.double() - exact[name]).abs().max(), exact[name].abs().max()
        assert error <= 1e-5 * largest, f"{name}: off by {error:.3g} of {largest:.3g}"


# No statistic ever holds anything near the (B, H, L, S) tensor.


FLOAT = 4  # bytes
MASKS = {"full": None, "causal": masks.causal(), "window": masks.sliding_window(100, 0)}


@in_turn({"statistic": [name for name in EVERY if name != "head_average"]}, {"mask": MASKS})
def test_no_block_is_near_the_full_tensor(statistic: str, mask: str) -> None:
    """The largest storage of any operation, compared with the (B, H, L, S) scores."""
    heads, length = 4, 3001
    query, key, value = (torch.randn(1, heads, length, 4) for _ in range(3))
    with Allocations(query, key, value) as allocations:
        clearhead.attention_statistics(query, key, MASKS[mask], value=value, statistics=(statistic,))
    scores = heads * length * length * FLOAT
    assert allocations.largest < scores / 10, f"{allocations.operation}: {allocations.largest} of {scores}"


def grown(length: int) -> float:
    """Megabytes that the default statistics and the output of 8 heads add to the peak of this process."""
    torch.set_num_threads(1)
    query, key, value = (torch.randn(1, 8, length, 4) for _ in range(3))
    names = ("entropy", "received", "max_logit", "top_k", "output")

    def attend(count: int) -> object:
        call = (tensor[:, :, :count] for tensor in (query, key))
        return clearhead.attention_statistics(*call, value=value[:, :, :count], statistics=names)

    attend(1025)
    return growth_of_peak(lambda: attend(length))[0]


def test_memory_of_the_process_stays_far_below_the_scores() -> None:
    """Only the operating system sees the memory of compiled code."""
    length = 6007
    assert in_a_process(grown, length) < 8 * length * length * FLOAT / 1e6 / 20


@pytest.mark.parametrize("name", [*EVERY, "mass"])
def test_another_default_device_changes_nothing(name: str) -> None:
    x = torch.randn(1, 2, 5, 8)
    options: dict[str, Any] = {"statistics": (name,), "value": x if name == "output_norm" else None}
    if name == "mass":
        options["masses"] = (Mass(-1, 1), Mass(key_labels=torch.arange(5) % 2))
    expected = clearhead.attention_statistics(x, x, **options)
    with torch.device("meta"):
        result = clearhead.attention_statistics(x, x, **options)
    torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=0, atol=0)


def test_rows_whose_scores_all_overflow_have_no_weights() -> None:
    query = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    query[0, 0, 1] = math.inf
    chosen = clearhead.attention_statistics(query, -torch.ones_like(query), statistics=("rows", "head_average"))
    assert chosen.rows is not None
    assert chosen.rows[0, 0].tolist() == [[0.5, 0.5], [0, 0]]
    assert torch.equal(chosen.rows[:, 0], chosen.head_average)
