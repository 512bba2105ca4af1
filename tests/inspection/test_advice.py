"""The advice of a record that saw no attention, followed on the model that it was given for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from benchmarks.quality.architectures_cases.building import build
from benchmarks.quality.architectures_cases.inputs import find_inputs
from benchmarks.quality.architectures_cases.types import Architecture, architectures
from clearhead.errors import RecordError

pytestmark = pytest.mark.filterwarnings("ignore")

OWN_CODE = ["big_bird", "bloom", "deberta-v2", "funnel", "gptj", "layoutlmv3", "longformer", "mpnet", "mpt", "xlnet"]
INTERFACE = ["bert", "gpt2", "llama", "vit"]


@pytest.fixture(scope="module")
def by_name() -> dict[str, Architecture]:
    return {architecture.name: architecture for architecture in architectures()}


def refusal(model: nn.Module, inputs: dict[str, Any]) -> str:
    with pytest.raises(RecordError) as caught, torch.no_grad(), clearhead.record(model):
        model(**inputs)
    return str(caught.value)


@pytest.mark.parametrize("name", [*OWN_CODE, *INTERFACE])
def test_the_advice_works_on_the_model(name: str, by_name: dict[str, Architecture]) -> None:
    if name not in by_name:
        pytest.skip("this version of transformers has no such architecture")
    model = build(by_name[name])
    inputs = find_inputs(model)
    text = refusal(model, inputs)
    if name in INTERFACE:
        assert "For this model of transformers call model.set_attn_implementation('sdpa')." in text
        assert "plot.given" not in text
        model.set_attn_implementation("sdpa")
        with torch.no_grad(), clearhead.record(model) as record:
            model(**inputs)
        assert len(record) > 0
        return
    assert "computes with code of its own, which set_attn_implementation does not change" in text
    assert "set_attn_implementation('sdpa')" not in text
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    assert "clearhead.plot.given" in text
    if all(isinstance(each, Tensor) and (each.sum(-1) - 1).abs().max() < 1e-3 for each in weights):
        assert len(clearhead.plot.given(weights)) == len(weights)


def test_where_no_softmax_was_seen_there_is_no_advice_for_transformers(by_name: dict[str, Architecture]) -> None:
    model = build(by_name["fnet"])
    text = refusal(model, find_inputs(model))
    assert text.endswith("uncompiled. Of a compiled model record model._orig_mod.")
