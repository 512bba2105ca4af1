"""Architectures of transformers beside eager attention: the checks of `python -m benchmarks.architectures`."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import clearhead.integrations.transformers  # noqa: F401  (registers the implementation)
from benchmarks.architectures_cases.comparing import ROUTES, compare
from benchmarks.architectures_cases.results import LIMIT, Outcome
from benchmarks.architectures_cases.types import Architecture, architectures

pytestmark = pytest.mark.filterwarnings("ignore")

TYPICAL = [
    "albert",
    "bart",
    "bert",
    "clip",
    "distilbert",
    "electra",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "llama4_text",
    "llava",
    "mistral",
    "mixtral",
    "modernbert",
    "opt",
    "phi",
    "qwen2_vl",
    "qwen3",
    "roberta",
    "siglip_vision_model",
    "splinter",
    "t5",
    "vit",
    "whisper",
]
# Each builds its masks or looks up its attention in a way of its own.
PARTICULAR = [
    "big_bird",
    "bigbird_pegasus",
    "blip",
    "bloom",
    "bridgetower",
    "bros",
    "canine",
    "codegen",
    "convbert",
    "data2vec-vision",
    "falcon",
    "flava",
    "gemma4_audio",
    "git",
    "gptj",
    "gpt_neox_japanese",
    "granite_swa",
    "granitemoe_swa",
    "groupvit",
    "ibert",
    "imagegpt",
    "layoutlmv3",
    "led",
    "lilt",
    "longformer",
    "megatron-bert",
    "moss_transcribe_diarize_audio",
    "mpnet",
    "mpt",
    "mvp",
    "nllb-moe",
    "nystromformer",
    "pegasus_x",
    "rembert",
    "roformer",
    "sam",
    "squeezebert",
    "tapas",
    "trocr",
    "vilt",
    "visual_bert",
    "vits",
    "voxtral_encoder",
    "xglm",
]


@pytest.fixture(scope="module")
def by_name() -> dict[str, Architecture]:
    return {architecture.name: architecture for architecture in architectures()}


def described(outcome: Outcome) -> list[str]:
    return [f"{found.route}, {found.observation}: {found.value:.1e} {found.text}" for found in outcome.wrong]


@pytest.mark.parametrize("name", TYPICAL)
def test_a_typical_architecture_computes_what_eager_computes(name: str, by_name: dict[str, Architecture]) -> None:
    outcome = compare(by_name[name])
    assert outcome.not_built == ""
    assert described(outcome) == []
    assert outcome.status == "agrees"
    assert all(outcome.calls[route] > 0 for route in ROUTES)


@pytest.mark.parametrize("name", PARTICULAR)
def test_a_particular_architecture_computes_what_eager_computes_or_refuses(
    name: str, by_name: dict[str, Architecture]
) -> None:
    outcome = compare(by_name[name])
    assert outcome.not_built == ""
    assert described(outcome) == []
    assert outcome.compared > 0 or set(outcome.refused) == set(ROUTES)


def test_sinks_are_in_the_denominator_of_weights(by_name: dict[str, Architecture]) -> None:
    outcome = compare(by_name["granite_swa"])
    assert all(found.observation.startswith("weights") for found in outcome.known)
    assert {found.route for found in outcome.known} == set(ROUTES)


def without_mask(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    output = F.scaled_dot_product_attention(query, key, value, scale=others["scaling"], enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


def test_lost_masks_and_ignored_weights_are_found(by_name: dict[str, Architecture]) -> None:
    AttentionInterface.register("without_mask", without_mask)
    AttentionMaskInterface.register("without_mask", lambda **_: None)
    outcome = compare(by_name["llama"], "without_mask")
    assert outcome.status == "differs"
    assert {found.route for found in outcome.violations} == set(ROUTES)
    assert {found.text for found in outcome.missing} == {"attentions[0], attentions[1]"}
    unexplained = {found.observation for found in outcome.unexplained if found.value > 1000 * LIMIT}
    assert {"outputs", "outputs, left padding", "cache", "gradients", "gradients, right padding"} <= unexplained


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_is_seen_is_found(side: str, by_name: dict[str, Architecture]) -> None:
    AttentionInterface.register("without_mask", without_mask)
    AttentionMaskInterface.register("without_mask", lambda **_: None)
    outcome = compare(by_name["bert"], "without_mask")
    assert "outputs" not in {found.observation for found in outcome.differences}
    assert f"outputs, {side} padding" in {found.observation for found in outcome.unexplained}
