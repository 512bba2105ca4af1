"""Models that look up the class of their attention in a table load by our name; the report says what they keep."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconModel,
    GitConfig,
    GitModel,
    GPTJConfig,
    GPTJModel,
    PreTrainedModel,
    SamVisionConfig,
    SamVisionModel,
)

import clearhead
import clearhead.integrations.transformers
from clearhead.integrations._class_tables import accept_in_tables

VOCABULARY, LENGTH = 41, 7
GIT_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
GIT = {
    "vision_config": GIT_VISION,
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
SAM = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "window_size": 2,
    "global_attn_indexes": [1],
    "output_channels": 8,
    "mlp_dim": 24,
}


def falcon() -> tuple[type[PreTrainedModel], Any]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return FalconModel, FalconConfig(vocab_size=VOCABULARY, **sizes)


def gptj() -> tuple[type[PreTrainedModel], Any]:
    return GPTJModel, GPTJConfig(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, rotary_dim=4, n_positions=32)


def pair(kind: type[PreTrainedModel], config: Any) -> tuple[Any, Any]:
    """The model by the name and with eager attention, with the same parameters."""
    torch.manual_seed(0)
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind._from_config(config, attn_implementation="clearhead").eval()
    ours.load_state_dict(eager.state_dict())
    return ours, eager


@pytest.mark.parametrize("make", [falcon, gptj])
def test_a_model_of_a_table_loads_and_computes_what_eager_computes(make: Any) -> None:
    ours, eager = pair(*make())
    ids = torch.randint(1, VOCABULARY, (2, LENGTH))
    mask = torch.tensor([[1] * LENGTH, [0, 0] + [1] * (LENGTH - 2)])
    actual, expected = (model(ids, attention_mask=mask).last_hidden_state for model in (ours, eager))
    assert torch.equal(actual[mask.bool()], expected[mask.bool()])
    report = clearhead.upgrade(ours, linears=False)
    assert report.models == ()
    assert report.left[""] == f"{type(ours).__name__} computes attention with code of its own"


def test_a_vision_encoder_of_a_table_is_not_said_to_run_on_clearhead() -> None:
    ours, eager = pair(SamVisionModel, SamVisionConfig(**SAM))
    pixels = torch.randn(1, 3, 32, 32)
    assert torch.equal(ours(pixels).last_hidden_state, eager(pixels).last_hidden_state)
    assert "none of its layers calls the attention function" in clearhead.upgrade(ours, linears=False).left[""]


def test_the_report_names_the_part_that_keeps_its_attention() -> None:
    _, eager = pair(GitModel, GitConfig(**GIT))
    report = clearhead.upgrade(eager, linears=False)
    assert report.models == ("",)
    why = "GitSelfAttention, of 3 module(s), is from a table of classes and has code of its own"
    assert report.left == {"encoder.layer.0.attention.self": why}
    assert "left alone: encoder.layer.0.attention.self" in str(report)
    outer = torch.nn.ModuleDict({"model": GitModel(GitConfig(**GIT))})
    assert list(clearhead.upgrade(outer, linears=False).left) == ["model.encoder.layer.0.attention.self"]


def test_the_check_of_names_is_extended_once() -> None:
    before = PreTrainedModel.get_correct_attn_implementation
    accept_in_tables("clearhead")
    assert PreTrainedModel.get_correct_attn_implementation is before


def test_names_that_transformers_does_not_know_are_still_refused() -> None:
    kind, config = falcon()
    with pytest.raises(ValueError, match="is not supported"):
        kind._from_config(config, attn_implementation="clearheed")
