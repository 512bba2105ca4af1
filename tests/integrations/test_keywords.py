"""Every keyword that changes the result is honoured or refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sliding_window_causal_mask_function,
)

from clearhead._layer.tokens import find_tokens, sequences_between
from clearhead.errors import ArgumentError, ClearheadError, DeviceError, DTypeError, ShapeError
from clearhead.integrations._packed_row import boundaries_of
from clearhead.integrations.transformers import attention_forward, make_mask
from tests.support.oracle import Problem, solve

B, H, HKV, L, S, D = 2, 6, 3, 5, 7, 4


def layer(**attributes: Any) -> Any:
    return SimpleNamespace(training=False, **attributes)


def tensors(length: int = L, keys: int = S, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, H, length, D), torch.randn(batch, HKV, keys, D), torch.randn(batch, HKV, keys, D)


def formula(*inputs: Tensor, bias: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """The output (B, L, H, D) and the weights of the oracle."""
    answer = solve(Problem(*inputs, lambda *_: True, () if bias is None else (bias,), **settings))
    return answer.output.transpose(1, 2), answer.weights


def hidden(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, float("-inf")).double()


def check(expected: tuple[Tensor, Tensor], module: Any, *arguments: Any, **options: Any) -> None:
    output, weights = attention_forward(module, *arguments, output_attentions=True, **options)
    assert weights is not None
    torch.testing.assert_close(output.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(weights.double(), expected[1], rtol=0, atol=1e-5)
    without, nothing = attention_forward(module, *arguments, **options)
    assert nothing is None
    assert without.equal(output)


@pytest.mark.parametrize("options", [{}, {"scaling": 0.3}, {"softcap": 1.5}, {"s_aux": torch.linspace(-2, 3, H)}])
def test_numbers_of_the_softmax(options: dict[str, Any]) -> None:
    inputs = tensors()
    ours = {"scaling": "scale", "softcap": "softcap", "s_aux": "sinks"}
    check(formula(*inputs, **{ours[name]: value for name, value in options.items()}), layer(), *inputs, None, **options)


def test_position_bias_adds_to_a_mask() -> None:
    inputs = tensors()
    position_bias, keep = torch.randn(1, H, L, S), torch.rand(B, 1, L, S) > 0.3
    expected = formula(*inputs, bias=position_bias + hidden(keep))
    check(expected, layer(), *inputs, keep, position_bias=position_bias)


@pytest.mark.parametrize(
    ("options", "first", "last"),
    [
        *((options, -S, S) for options in ({}, {"is_causal": None}, {"is_causal": False})),
        ({"is_causal": True}, -S, 0),
        ({"sliding_window": 3, "is_causal": True}, -2, 0),
        ({"sliding_window": 3, "is_causal": False}, -S, S),  # a window is in the mask, and None masks nothing
        ({"sliding_window": 3}, -S, S),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [S, 3, 1])
def test_without_a_mask_the_call_hides_keys_by_distance_and_the_module_none(
    length: int, options: dict[str, Any], first: int, last: int
) -> None:
    """The last query is at the last key."""
    inputs = tensors(length)
    distance = torch.arange(S) - (torch.arange(length)[:, None] + S - length)
    visible = (first <= distance) & (distance <= last)
    check(formula(*inputs, bias=hidden(visible)), layer(is_causal=True), *inputs, None, **options)


def test_packed_rows_by_their_boundaries() -> None:
    inputs = tensors(7, 7, batch=1)
    document = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    visible = (document == document[:, None]).tril()
    bounds = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
    options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 3, "max_length_k": 3}
    check(formula(*inputs, bias=hidden(visible)), layer(), *inputs, None, is_causal=True, **options)


@pytest.mark.parametrize(("length", "keys"), [(7, 9), (9, 7), (9, 9), (7, 6)])
def test_known_boundaries_beside_other_operands_are_refused(length: int, keys: int) -> None:
    """Those of an encoder without padding, which carry what was read of them."""
    tokens = find_tokens(torch.arange(5) < torch.tensor([[3], [4]]), 2, 5)
    bounds = boundaries_of(sequences_between(tokens, tokens, torch.device("cpu")))
    options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    for _ in range(2):
        attention_forward(layer(), *tensors(7, 7, batch=1), None, **options)
        with pytest.raises(ClearheadError, match=r"^cu_seq_lens"):
            attention_forward(layer(), *tensors(length, keys, batch=1), None, **options)


@pytest.mark.parametrize("of_keys", [[0, 4, 7], [0, 3, 3, 7], [0, 7]], ids=str)
def test_other_boundaries_of_keys_are_refused(of_keys: list[int]) -> None:
    bounds = {"cu_seq_lens_q": torch.tensor([0, 3, 7]), "cu_seq_lens_k": torch.tensor(of_keys)}
    with pytest.raises(ClearheadError, match=r"^cu_seq_lens"):
        attention_forward(layer(), *tensors(7, 7, batch=1), None, **bounds)


@pytest.mark.parametrize("lowest", [None, torch.finfo(torch.float32).min, float("-inf")])
def test_masks_are_bool_or_hide_with_the_lowest_number(lowest: float | None) -> None:
    """A mask hides all that is hidden: a window of the call or what the module says adds nothing."""
    inputs = tensors(5, 5)
    keep = torch.rand(B, 1, 5, 5) > 0.3
    keep[..., 0], keep[0, :, 2] = True, False  # one query sees no key
    mask = keep if lowest is None else torch.where(keep, 0.0, lowest)
    check(formula(*inputs, bias=hidden(keep)), layer(is_causal=True), *inputs, mask, sliding_window=2)


def test_dropout_counts_only_while_training() -> None:
    inputs = tensors()
    evaluated, _ = attention_forward(layer(), *inputs, None, dropout=1.0)
    torch.testing.assert_close(evaluated.double(), formula(*inputs)[0], rtol=0, atol=1e-5)
    trained, _ = attention_forward(SimpleNamespace(training=True, is_causal=False), *inputs, None, dropout=1.0)
    assert trained.eq(0).all()


def test_half_precision_and_queries_shared_by_the_batch() -> None:
    query, key, value = tensors()
    check(formula(query[:1].expand(B, -1, -1, -1), key, value), layer(), query[:1], key, value, None)
    half = (tensor.bfloat16() for tensor in (query, key, value))
    assert {x.dtype for x in attention_forward(layer(), *half, None, output_attentions=True)} == {torch.bfloat16}


def test_unknown_keywords_are_refused_by_name_unless_they_are_none() -> None:
    inputs = tensors()
    for name in ("index_scores", "stripes"):
        with pytest.raises(ArgumentError, match=f"^{name}: .*may change the result"):
            attention_forward(layer(), *inputs, None, **{name: torch.zeros(1)})
    check(formula(*inputs), layer(), *inputs, None, indices=None, use_cache=True, position_ids=torch.arange(L)[None])


def test_masks_that_cannot_be_read() -> None:
    inputs = tensors()
    with pytest.raises(DTypeError, match=r"attention_mask: .*torch.int64 tensor \(2, 1, 5, 7\)"):
        attention_forward(layer(), *inputs, torch.ones(B, 1, L, S, dtype=torch.long))
    with pytest.raises(ShapeError, match="cu_seq_lens_q"):
        attention_forward(layer(), *inputs, None, cu_seq_lens_q=torch.tensor([0, 5]))


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_boundaries_without_data_are_refused(name: str) -> None:
    starts = torch.tensor([0, 3, 5])
    given: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, name: starts.to("meta")}
    with pytest.raises(DeviceError, match=rf"{name}: expected the \w+'s cpu, got meta"):
        attention_forward(torch.nn.Module(), *tensors(5, 5, batch=1), None, **given)


# The mask between a model's mask function and its layers: eager's values for any operator, exact for attention.


def padding(keys: int = S) -> Tensor:
    mask = torch.ones(B, keys, dtype=torch.bool)
    mask[1, :2] = False
    return mask


CAUSAL = {"batch_size": B, "q_length": S, "kv_length": S, "mask_function": causal_mask_function}
FULL = {"batch_size": B, "q_length": L, "kv_length": S, "mask_function": bidirectional_mask_function}
MASKS: dict[str, dict[str, Any]] = {
    "causal": CAUSAL,
    "causal, no skip": CAUSAL | {"allow_is_causal_skip": False},
    "causal, padded": CAUSAL | {"attention_mask": padding()},
    "one token on a cache": CAUSAL | {"q_length": 1, "q_offset": S - 1},
    "several tokens on a cache": CAUSAL | {"q_length": 3, "q_offset": S - 3},
    "static cache": CAUSAL | {"q_length": 3},
    "static cache, tensor": CAUSAL | {"q_length": 3, "q_offset": torch.tensor(2)},
    "window": CAUSAL | {"mask_function": sliding_window_causal_mask_function(3), "local_size": 3},
    "wide window": CAUSAL | {"mask_function": sliding_window_causal_mask_function(9), "local_size": 9},
    "chunks": CAUSAL
    | {"mask_function": chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.long)), "local_size": 3},
    "bidirectional": FULL | {"allow_is_causal_skip": False},
    "bidirectional, padded": FULL | {"allow_is_causal_skip": False, "attention_mask": padding()},
    "bidirectional, left out": FULL | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True},
}


@pytest.fixture(name="never_read")
def _never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(self: Any) -> None:
        raise RuntimeError("read")

    monkeypatch.setattr(type(make_mask(**CAUSAL)), "computed", unwanted)


def attend(mask: Tensor | None, length: int = S, keys: int = S) -> Tensor:
    torch.manual_seed(3)
    query, key, value = torch.randn(B, 3, length, 4), torch.randn(B, 3, keys, 4), torch.randn(B, 3, keys, 4)
    return attention_forward(SimpleNamespace(training=False), query, key, value, mask)[0]


@pytest.mark.parametrize("name", MASKS)
def test_what_is_read_is_eagers_mask(name: str) -> None:
    expected, mask = (make(**MASKS[name], dtype=torch.bfloat16) for make in (eager_mask, make_mask))
    assert (mask is None) == (expected is None)
    if mask is not None:
        assert (mask.shape, mask.dtype, mask.device, mask.ndim) == (expected.shape, torch.bfloat16, expected.device, 4)
        assert torch.equal(mask + 0, expected)


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_eagers_mask(name: str, never_read: None) -> None:
    sizes = MASKS[name]["q_length"], MASKS[name]["kv_length"]
    expected = attend(eager_mask(**MASKS[name]), *sizes)
    torch.testing.assert_close(attend(make_mask(**MASKS[name]), *sizes), expected, rtol=0, atol=1e-6)


READS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda mask: mask[:, :, 1:, :4],
    "sum": lambda mask: 1 + mask,
    "in an argument list": lambda mask: torch.cat([mask, mask], -1),
    "another dtype": lambda mask: mask.to(torch.float64),
    "comparison": lambda mask: mask < 0,
    "negation": lambda mask: ~mask.bool(),
    "python": lambda mask: torch.tensor(mask.tolist()),
    "numpy": lambda mask: torch.from_numpy(mask.numpy()),
    "repr": repr,
    "copy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "out": lambda mask: torch.add(mask, 1, out=torch.empty(B, 1, S, S)),
    "vmap": lambda mask: torch.vmap(lambda row: row * 2)(mask),
}


@pytest.mark.parametrize("read", READS)
def test_every_way_of_reading(read: str) -> None:
    expected, actual = (READS[read](make(**MASKS["causal, padded"])) for make in (eager_mask, make_mask))
    assert type(actual) is type(expected)
    assert torch.equal(actual, expected) if isinstance(expected, Tensor) else actual == expected


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda mask: mask.zero_(),
    "part": lambda mask: mask[:, :, 0].fill_(0.0),
    "view taken before": lambda mask: mask.view(-1).zero_(),
    "item": lambda mask: mask.__setitem__((slice(None), 0, 0, S - 1), 0.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["causal", "causal, padded"])
def test_what_a_model_writes_into_the_mask_counts(name: str, write: str) -> None:
    expected, mask = (make(**MASKS[name]) for make in (eager_mask, make_mask))
    assert expected is not None
    assert mask is not None
    before = attend(mask)
    WRITES[write](expected)
    WRITES[write](mask)
    assert torch.equal(mask + 0, expected)
    assert torch.equal(attend(mask), attend(expected))
    assert not torch.equal(attend(mask), before)


def test_metadata_is_no_reading_and_takes_no_memory(never_read: None) -> None:
    """A causal mask over 100,000 keys would take 40 GB."""
    mask = make_mask(batch_size=1, q_length=100_000, kv_length=100_000, mask_function=causal_mask_function)
    assert mask is not None
    assert (mask.shape, mask.size(-1), mask.dim()) == ((1, 1, 100_000, 100_000), 100_000, 4)
    assert mask.is_floating_point()
    assert not mask.requires_grad
    assert mask.to("cpu") is mask


def test_inside_a_graph_and_a_transform_it_is_an_ordinary_tensor() -> None:
    def made(factor: Tensor, padded: Tensor | None = None) -> Tensor:
        mask = make_mask(**CAUSAL, attention_mask=padded)
        assert mask is not None
        assert type(mask) is Tensor
        return mask * factor

    compiled = torch.compile(made, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(()), padding()), eager_mask(**MASKS["causal, padded"]))
    mapped = torch.vmap(made)(torch.ones(2))
    assert torch.equal(mapped[1], eager_mask(**CAUSAL))
