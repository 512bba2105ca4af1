"""Attention that `record` cannot see is named, and an empty record is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import clearhead
from clearhead.errors import RecordError, UnseenAttentionWarning

from .stacks import HEADS, NAMES, WIDTH, Stack


class OwnSoftmax(nn.Module):
    """Attention by hand, in one of the ways people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        heads = clearhead.split_heads(x, HEADS)
        scores = heads @ heads.transpose(-2, -1)
        ways = {
            "torch.softmax": lambda: torch.softmax(scores, -1),
            "torch.softmax, by keyword": lambda: torch.softmax(input=scores, dim=-1),
            "functional": lambda: nn.functional.softmax(scores, dim=-1),
            "method": lambda: scores.softmax(dim=-1),
            "module": lambda: self.layer(scores),
        }
        return clearhead.merge_heads(ways[self.how]() @ heads)


WAYS = ("torch.softmax", "torch.softmax, by keyword", "functional", "method", "module")


@pytest.mark.parametrize("how", WAYS)
def test_an_own_softmax_is_named(how: str, x: Tensor) -> None:
    name = r"odd\.layer \(Softmax\)" if how == "module" else r"odd \(OwnSoftmax\)"
    model = nn.Sequential()
    model.add_module("odd", OwnSoftmax(how))
    with pytest.raises(RecordError, match=f"no attention was seen.*computed by {name}"), clearhead.record(model):
        model(x)
    model.add_module("seen", Stack(1))
    warning = pytest.warns(UnseenAttentionWarning, match=f"not in the record was computed by {name}")
    with warning, clearhead.record(model) as rec:
        model(x)
    assert list(rec) == ["seen.blocks.0.attend"]


def test_a_softmax_over_classes_is_no_attention(model: Stack, x: Tensor) -> None:
    classify = nn.Sequential(model, nn.Softmax(-1))
    with clearhead.record(classify):
        classify(x)


EMPTY: dict[str, tuple[nn.Module, nn.Module]] = {
    "nothing runs": (Stack(1), nn.Identity()),
    "another model runs": (Stack(1), Stack(1)),
    "a model without attention": (shared := nn.Linear(WIDTH, WIDTH), shared),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_record_is_an_error(case: str, x: Tensor) -> None:
    recorded, runs = EMPTY[case]
    text = r"no attention was seen\. Attention is seen in Clearhead's modules"
    with pytest.raises(RecordError, match=text), clearhead.record(recorded):
        runs(x)


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_a_compiled_model_is_recorded_uncompiled(way: str, model: Stack, x: Tensor) -> None:
    compiled: Any = model
    if way == "torch.compile":
        compiled = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    expected = compiled(x)
    with clearhead.record(compiled) as rec:
        found = compiled(x)
    torch.testing.assert_close(found, expected)
    assert [name.removeprefix("_orig_mod.") for name in rec] == NAMES
    counter = CompileCounter()
    torch.compile(lambda y: y + 1, backend=counter)(x)
    assert counter.frame_count == 1, "the compiler is on again"
