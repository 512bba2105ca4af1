"""What `identify` says about a checkpoint, and what it says when it finds nothing, too much or something odd."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.checkpoints import Finding, Naming, identify, load
from clearhead.errors import CheckpointError, ClearheadError

E, H = 35, 5


def square(names: str, prefix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}{name}.weight": torch.randn(E, E) for name in names.split()}


def error_of(state: Any, **options: Any) -> str:
    with pytest.raises(ClearheadError) as raised:
        identify(state, **options)
    assert str(raised.value).startswith("source: expected")
    return str(raised.value)


def test_a_finding_can_be_read() -> None:
    shapes = {"q_proj.weight": (24, 17), "k_proj.weight": (6, 19), "v_proj.weight": (6, 23), "o_proj.weight": (29, 24)}
    shapes |= {"v_proj.bias": (6,), "rotary_emb.inv_freq": (3,), "k_norm.weight": (6,)}
    finding = identify({f"decoder.attn.{name}": torch.empty(shape, device="meta") for name, shape in shapes.items()})
    assert isinstance(finding, Finding)
    assert not finding.naming.fused
    assert str(finding).splitlines() == [
        "o_proj: self-attention lessons; also Llama, Mistral and Qwen2, whose rotary position embeddings are not "
        "applied: these are the weights only",
        "  weights: q_proj.weight, k_proj.weight, v_proj.weight, o_proj.weight (under 'decoder.attn.')",
        "  sizes: query 17, key 19, value 23, all heads 24, grouped key/value heads 6, output 29",
        "  biases: value",
        "  ignored: rotary_emb.inv_freq",
        "  no place for k_norm.weight: normalises queries or keys head by head; checkpoints.from_transformers reads it "
        "with its eps",
    ]


def test_what_was_found_is_told_by_the_module_and_by_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="clearhead"):
        ours = load(square("W_q W_k W_v W_o", "enc."), H)
    assert str(ours.loaded_from) == str(identify(square("W_q W_k W_v W_o", "enc.")))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("clearhead", "INFO")
    assert "d2l: Dive into Deep Learning" in record.getMessage()
    assert "loaded_from" not in ours.state_dict()


def test_one_block_of_many_has_to_be_chosen() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H), 11)
    text = error_of(model)
    assert "expected one attention block, got 22, under 'layers.0.multihead_attn.', 'layers.0.self_attn.', " in text
    assert text.endswith("'layers.10.multihead_attn.', 'layers.10.self_attn.'. Choose one with prefix=.")
    assert "got 2, under 'layers.1.multihead_attn.', 'layers.1.self_attn.'" in error_of(model, prefix="layers.1")
    assert identify(model, prefix="layers.1.self_attn").prefix == "layers.1.self_attn."
    assert identify(model, prefix="layers.10.multihead_attn.").prefix == "layers.10.multihead_attn."


def test_a_prefix_that_leads_nowhere() -> None:
    text = error_of(nn.TransformerEncoderLayer(E, H), prefix="attn")
    assert text == (
        "source: expected the names of an attention block under 'attn.', got no names. "
        "There is attention under 'self_attn.'."
    )


def test_incomplete_names_say_what_is_found_what_is_missing_and_what_is_nearest() -> None:
    text = error_of(square("w_q w_k w_v", "layers.0."))
    assert "got layers.0.w_q.weight, layers.0.w_k.weight, layers.0.w_v.weight. " in text
    assert "The nearest known naming is w_q (w_q.weight, w_k.weight, w_v.weight, w_o.weight); " in text
    assert "missing for it: layers.0.w_o.weight. " in text
    assert '{"query": linear, "key": linear, "value": linear, "output": linear}' in text


@pytest.mark.parametrize(
    ("names", "nearest", "missing"),
    [
        ("wQ wK wV wO", "wq", "wq.weight, wk.weight, wv.weight, wo.weight"),
        ("q_projection k_projection v_projection out_proj", "clearhead", "q_proj.weight, k_proj.weight, v_proj.weight"),
        ("att.self.query att.self.key att.self.value", "bert", "att.output.dense.weight"),
        ("qkv output", "timm", "proj.weight"),
        ("in_proj out_proj", "torch", "in_proj_weight"),
        ("W_q W_k W_v w_o", "d2l", "W_o.weight"),
    ],
)
def test_the_nearest_naming(names: str, nearest: str, missing: str) -> None:
    text = error_of(square(names))
    assert f"The nearest known naming is {nearest} (" in text
    assert f"missing for it: {missing}. " in text


def test_a_long_list_of_names_is_cut() -> None:
    state = {f"blocks.{index}.mlp.weight": torch.empty(1) for index in range(100)}
    assert "blocks.11.mlp.weight and 88 more. " in error_of(state)
    assert "got no names" in error_of({})


def test_two_namings_at_one_place_have_to_be_chosen_from() -> None:
    state = square("q_proj k_proj v_proj o_proj out_proj")
    assert "got keys under '' that fit clearhead, o_proj. Choose one with naming=." in error_of(state)
    finding = identify(state, naming="o_proj")
    assert (finding.naming.name, list(finding.obstacles)) == ("o_proj", ["out_proj.weight"])


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("router.weight", "no part of attention that is known here"),
        ("gate_proj.weight", "a gate of the output, which checkpoints.from_transformers reads"),
        ("q_proj.lora_A.weight", "LoRA: merge it into the weights first"),
        ("sinks", "sinks, which checkpoints.from_transformers reads"),
        ("relative_attention_bias.weight", "relative positions"),
        ("q_norm.weight", "normalises queries or keys"),
        ("k_layernorm.weight", "normalises queries or keys"),
    ],
)
def test_what_would_change_the_numbers_is_refused(extra: str, reason: str) -> None:
    state = square("q_proj k_proj v_proj o_proj", "a.") | {f"a.{extra}": torch.ones(E), "b.other": torch.ones(E)}
    with pytest.raises(CheckpointError) as raised:
        load(state, H)
    text = str(raised.value)
    assert text.startswith("source: expected nothing but attention under 'a.', named as o_proj, got a.")
    assert f"a.{extra} (" in text
    assert reason in text
    assert "b.other" not in text
    assert identify(state).obstacles.keys() == {extra}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"qkv.weight": torch.ones(50, E), "proj.weight": torch.ones(E, E)}, "query, key, value of one size"),
        ({"q": 3}, "source: expected a state dict, with a tensor under every name, got int under 'q'"),
        ({"model": {}, "epoch": 3}, "got dict under 'model'. If the state dict lies inside, pass source['model']"),
        ({"q": nn.Linear(3, 3), "k": nn.Linear(3, 3)}, "missing for it: v.weight, o.weight"),
        (
            {"w_q.weight": torch.ones(E)},
            "w_q.weight: expected a strided floating point tensor with 2 dimension(s)",
        ),
        ({"w_q.weight": torch.ones(E, E).char()}, "got a torch.int8 tensor (35, 35)"),
        ({"w_v.bias": torch.ones(E, E)}, "w_v.bias: expected a strided floating point tensor with 1 dimension(s)"),
        ({"w_v.bias": torch.ones(3)}, "the value bias has 3 entries and its weight 35 outputs"),
        ({"w_v.weight": torch.ones(30, E)}, "keys have 35 features and values 30"),
        ({"w_q.weight": torch.ones(30, E)}, "queries have 30 features and the output takes 35"),
    ],
)
def test_sources_that_do_not_fit(state: dict[str, Any], expected: str) -> None:
    others = square("w_q w_k w_v w_o") if any(name.startswith("w_") for name in state) else {}
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        load(others | state, H)


@pytest.mark.parametrize(
    ("weights", "biases", "text"),
    [
        (("w.weight",), (), "weights: expected entries of one tensor each, got 'w.weight'. Naming.of_linears("),
        (3, (), "weights: expected a tuple of entries"),
        ((), (), "naming: expected weights that hold query, key, value, output, each once, got none"),
        (Naming.of_linears("a", *"qkvo").weights[:3], (), "each once, got query, key, value"),
        (Naming.of_linears("a", *"qkvo").weights, (None,), "biases: expected entries of one tensor each, got None"),
    ],
)
def test_a_naming_that_cannot_be_used_is_refused(weights: Any, biases: Any, text: str) -> None:
    with pytest.raises(ClearheadError, match=re.escape(text)):
        load({}, H, naming=Naming("mine", "of mine", weights, biases))
