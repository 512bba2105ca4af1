"""Architectures of transformers beside eager attention: the checks of `python -m benchmarks.quality.architectures`."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, T5Config, T5Model

import clearhead.integrations.transformers  # noqa: F401  (registers the implementation)
from benchmarks.quality.architectures_cases.comparing import ROUTES, compare
from benchmarks.quality.architectures_cases.results import LIMIT
from benchmarks.quality.architectures_cases.types import Architecture, architectures

pytestmark = pytest.mark.filterwarnings("ignore")

# Each calls the attention function, or the one for masks, in a way that no other does.
AGREE = [
    "bart",
    "bert",
    "bridgetower",
    "clip",
    "gemma2",
    "gpt2",
    "gpt_oss",
    "llama",
    "llama4_text",
    "mistral",
    "modernbert",
    "moss_transcribe_diarize_audio",
    "qwen2_vl",
    "t5",
    "vit",
    "whisper",
]
KEEP_EAGER_OR_REFUSE = ["bloom", "falcon", "gemma4_audio", "git", "imagegpt", "longformer", "sam", "visual_bert"]


@pytest.fixture(scope="module")
def by_name() -> dict[str, Architecture]:
    return {architecture.name: architecture for architecture in architectures()}


def routes_of(name: str) -> tuple[str, ...]:
    """`set_attn_implementation` of older transformers does not reach the two stacks of T5, with any implementation."""
    if name == "t5":
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
        model = T5Model(T5Config(attn_implementation="eager", **sizes))
        model.set_attn_implementation("sdpa")
        if model.encoder.config._attn_implementation != "sdpa":
            return ("from_config",)
    return ROUTES


@pytest.mark.parametrize("name", [*AGREE, *KEEP_EAGER_OR_REFUSE])
def test_an_architecture_computes_what_eager_computes(name: str, by_name: dict[str, Architecture]) -> None:
    if name not in by_name:
        pytest.skip(f"transformers {transformers.__version__} has no such architecture")
    outcome = compare(by_name[name])
    assert outcome.not_built == ""
    assert [f"{each.route}, {each.observation}: {each.value:.1e} {each.text}" for each in outcome.wrong] == []
    if name in AGREE:
        assert outcome.status == "agrees"
        assert all(outcome.calls[route] > 0 for route in routes_of(name))
    else:
        assert outcome.compared > 0 or set(outcome.refused) == set(ROUTES)


def test_sinks_are_in_the_denominator_of_weights(by_name: dict[str, Architecture]) -> None:
    outcome = compare(by_name["granite_swa"])
    assert outcome.wrong == []
    assert all(each.observation.startswith("weights") for each in outcome.known)
    assert {each.route for each in outcome.known} == set(ROUTES)


@pytest.fixture
def without_mask() -> str:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **others: Any) -> tuple[Tensor, None]:
        output = F.scaled_dot_product_attention(query, key, value, scale=others["scaling"], enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("without_mask", attend)
    AttentionMaskInterface.register("without_mask", lambda **_: None)
    return "without_mask"


def test_lost_masks_and_ignored_weights_are_found(by_name: dict[str, Architecture], without_mask: str) -> None:
    outcome = compare(by_name["llama"], without_mask)
    assert outcome.status == "differs"
    assert {each.route for each in outcome.violations} == set(ROUTES)
    assert {each.text for each in outcome.missing} == {"attentions[0], attentions[1]"}
    unexplained = {each.observation for each in outcome.unexplained if each.value > 1000 * LIMIT}
    assert {"outputs", "outputs, left padding", "cache", "gradients", "gradients, right padding"} <= unexplained


def test_padding_that_is_seen_is_found(by_name: dict[str, Architecture], without_mask: str) -> None:
    outcome = compare(by_name["bert"], without_mask)
    assert "outputs" not in {each.observation for each in outcome.differences}
    unexplained = {each.observation for each in outcome.unexplained}
    assert {"outputs, left padding", "outputs, right padding"} <= unexplained
