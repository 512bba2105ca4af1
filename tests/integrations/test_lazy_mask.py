"""The mask between a model's mask function and its layers: eager's values for any operator, exact for attention."""

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

from clearhead.integrations.transformers import attention_forward, make_mask

B, L, S = 2, 5, 7


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
    if expected is None:
        assert mask is None
    else:
        assert mask is not None
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
