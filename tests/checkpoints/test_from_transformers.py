"""`from_transformers`: what it takes, what it says, what it refuses."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from clearhead import masks
from clearhead.checkpoints import from_transformers, layers_from_transformers
from clearhead.errors import ArgumentError, CheckpointError, DTypeError

from . import architectures
from .architectures import CASES, B, L, t5


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    torch.manual_seed(7)
    names = ("llama", "mistral", "qwen3", "gemma2", "gpt_oss", "gpt_neox", "bert")
    return {name: CASES[name].model() for name in names} | {"deepseek_v3": CASES["deepseek, low-rank queries"].model()}


@torch.no_grad()
def same(left: Any, right: Any) -> bool:
    x = torch.randn(B, L, left.embed_dim)
    return torch.equal(left.eval()(x, mask=masks.causal()), right.eval()(x, mask=masks.causal()))


def changed(config: Any, **settings: Any) -> Any:
    """The same configuration with other settings; those given as ... are missing."""
    kept = {name: value for name, value in config.to_dict().items() if settings.get(name) is not ...}
    return SimpleNamespace(**(kept | {name: value for name, value in settings.items() if value is not ...}))


@pytest.mark.parametrize("source", ["state dict", "torch.save", "wrapped"])
def test_every_kind_of_source_gives_the_same(models: dict[str, Any], source: str, tmp_path: Path) -> None:
    model = models["gpt_oss"]
    given: Any = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if source == "torch.save":
        torch.save(given, tmp_path / "model.bin")
        given = str(tmp_path / "model.bin")
    elif source == "wrapped":
        given = nn.ModuleDict({"backbone": model})
    assert same(from_transformers(given, 1, config=model.config), from_transformers(model, 1))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_the_result_is_a_copy_in_its_own_dtypes(models: dict[str, Any], name: str) -> None:
    model = copy.deepcopy(models[name]).to(torch.bfloat16)
    kept = getattr(model.layers[1].self_attn, "sinks", model.layers[1].self_attn.o_proj.weight)
    kept.data = kept.data.float()
    ours = from_transformers(model, 1)
    dtypes = {key: parameter.dtype for key, parameter in ours.named_parameters()}
    single = "sinks" if name == "gpt_oss" else "out_proj.weight"
    assert dtypes == dict.fromkeys(dtypes, torch.bfloat16) | {single: torch.float32}
    assert not {each.data_ptr() for each in ours.parameters()} & {each.data_ptr() for each in model.parameters()}
    assert all(parameter.requires_grad for parameter in ours.parameters())
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))


def test_nothing_random_is_drawn(models: dict[str, Any]) -> None:
    theirs = t5()
    before = torch.get_rng_state()
    from_transformers(models["qwen3"], 1)
    from_transformers(models["deepseek_v3"], 1)
    from_transformers(theirs, 0, part="decoder")
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_and_mode_are_the_model_s() -> None:
    model = architectures.build("Bert", CASES["bert"].options | {"attention_probs_dropout_prob": 0.25})
    assert (from_transformers(model.train(), 0).dropout, from_transformers(model, 0).training) == (0.25, True)
    assert not from_transformers(model.eval(), 0).training


def test_all_layers_are_what_each_is_alone(models: dict[str, Any]) -> None:
    for name, count in (("llama", 2), ("gemma2", 3), ("gpt_neox", 2), ("deepseek_v3", 2)):
        layers = layers_from_transformers(models[name])
        assert len(layers) == count
        assert all(same(layer, from_transformers(models[name], number)) for number, layer in enumerate(layers))


def test_what_was_read_is_told_by_the_module_and_the_logger(
    models: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="clearhead"):
        ours = from_transformers(models["gemma2"], 2)
    assert str(ours.loaded_from).splitlines() == [
        "gemma2, layer 2, self attention",
        "  weights: q_proj.weight, k_proj.weight, v_proj.weight, o_proj.weight (under 'layers.2.self_attn.')",
        "  heads: 6, key/value heads 2, head_dim 10",
        "  position: Rotary(head_dim=10, base=10000)",
        "  scale: 0.22941573387056177",
        "  softcap: 1.5",
        "  mask: sliding_window(3, 0)",
        "  the future: not hidden here, but hidden in the model. Pass mask=masks.causal()",
    ]
    (record,) = caplog.records
    assert record.getMessage() == f"loaded attention from {ours.loaded_from}"
    assert "sinks: one per head" in str(from_transformers(models["gpt_oss"], 0).loaded_from)
    assert "the future: not hidden in the model" in str(from_transformers(models["bert"], 0).loaded_from)


def test_settings_that_switch_something_off(models: dict[str, Any]) -> None:
    mistral, gemma2 = models["mistral"], models["gemma2"]
    assert from_transformers(mistral, 0, config=changed(mistral.config, sliding_window=None)).mask is None
    uncapped = changed(gemma2.config, attn_logit_softcapping=None)
    assert from_transformers(gemma2, 1, config=uncapped).softcap is None


KNOWN = "llama, mistral, qwen3, gemma2, gpt_oss, gpt_neox, bloom, t5, deepseek_v2, deepseek_v3, gpt2, bert, vit"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"config": None}, ArgumentError, "config: expected the model's configuration, got None. .* pass config=model"),
        ({"config": {"model_type": "llama"}}, DTypeError, "object with model_type, got dict. transformers.AutoConfig"),
        (
            {"config": SimpleNamespace(model_type="mamba", num_hidden_layers=1)},
            ArgumentError,
            f"config.model_type: expected one of {KNOWN}, got 'mamba'. For other models, checkpoints.load reads the w",
        ),
        ({"layer": 2}, ArgumentError, "layer: expected 0 … 1, the layers of the model, got 2"),
        ({"layer": -1}, ArgumentError, "layer: expected 0 … 1, the layers of the model, got -1"),
        ({"layer": "1"}, DTypeError, "layer: expected 0 … 1, the layers of the model, got '1'"),
        ({"part": "cross"}, ArgumentError, "part: expected 'self' in llama, got 'cross'"),
        ({"config": transformers.T5Config()}, ArgumentError, "expected 'encoder' or 'decoder' or 'cross' in t5, got"),
    ],
)
def test_arguments_that_do_not_fit(
    models: dict[str, Any], given: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments = {"layer": 0, "config": models["llama"].config} | given
    with pytest.raises(error, match=text):
        from_transformers(models["llama"].state_dict(), **arguments)


def test_t5_without_its_bias() -> None:
    model, name = t5(), "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    state = {key: tensor for key, tensor in model.state_dict().items() if key != name}
    with pytest.raises(CheckpointError, match=f"got no {re.escape(name)}"):
        from_transformers(state, 2, config=model.config, part="decoder")


def test_weights_of_another_model_and_two_models_in_one(models: dict[str, Any]) -> None:
    llama = models["llama"]
    for source, text in (
        (models["bert"], "attention of llama under 'layers.0.self_attn.', got embeddings.word_embeddings.weight, "),
        ({}, "expected attention of llama .*, got no names"),
        (nn.ModuleDict({"a": llama, "b": llama}), "got several, under 'a.layers.0.self_attn.', 'b.layers"),
    ):
        with pytest.raises(CheckpointError, match=text):
            from_transformers(source, 0, config=llama.config)


def test_layers_of_another_name_do_not_count(models: dict[str, Any]) -> None:
    state = models["llama"].state_dict()
    more = {name.replace("layers.", "draft_layers."): torch.zeros_like(tensor) for name, tensor in state.items()}
    assert same(
        from_transformers(more | state, 1, config=models["llama"].config), from_transformers(models["llama"], 1)
    )


@pytest.mark.parametrize(
    ("name", "prefix", "keys"),
    [
        ("gpt_neox", "layers.1.attention", "masked_bias bias rotary_emb.inv_freq"),
        ("llama", "layers.1.self_attn", "rotary_emb.inv_freq"),
        ("deepseek_v3", "layers.1.self_attn", "rotary_emb.inv_freq"),
        ("bert", "encoder.layer.1.attention", "output.LayerNorm.gamma"),
    ],
)
def test_what_old_files_have_besides(models: dict[str, Any], name: str, prefix: str, keys: str) -> None:
    state = models[name].state_dict() | {f"{prefix}.{key}": torch.ones(3) for key in keys.split()}
    assert same(from_transformers(state, 1, config=models[name].config), from_transformers(models[name], 1))


def read(model: Any, layer: int, drop: str = "", add: str = "", **settings: Any) -> Any:
    """A layer of a model under other settings, where some tensors of layer 1 are missing and others have 42 ones."""
    state = model.state_dict() | {f"layers.1.self_attn.{key}": torch.ones(42) for key in add.split()}
    for key in drop.split():
        del state[f"layers.1.self_attn.{key}"]
    return from_transformers(state, layer, config=changed(model.config, **settings))


LONGROPE = {"rope_type": "longrope"}
MISSING = "^source: expected what {0} with this configuration has under '{1}', got no {1}"
LEFT_OUT = "nothing but what {0} has under '{1}', got {1}"
CONVERT = "The weights are quantised: convert them to bfloat16 first"
EVERY_HEAD = "expected num_attention_heads = 5, for every head has .* own, got 1"
#: Names of models, texts, and arguments of `read`. In a text {0} is the name, and {1} where layer 1 is.
REFUSED: dict[type[Exception], list[tuple[str, str, dict[str, Any]]]] = {
    CheckpointError: [
        ("llama", rf"{MISSING}o_proj\.weight\.$", {"drop": "o_proj.weight"}),
        ("llama", rf"{MISSING}k_proj\.bias\.$", {"drop": "k_proj.bias"}),
        ("qwen3", rf"{MISSING}k_norm\.weight\.$", {"drop": "k_norm.weight"}),
        ("gpt_oss", rf"{MISSING}sinks\.$", {"drop": "sinks"}),
        (
            "deepseek_v3",
            rf"{MISSING}q_b_proj\.weight, {{1}}kv_a_layernorm\.weight\.$",
            {"drop": "q_b_proj.weight kv_a_layernorm.weight"},
        ),
        ("llama", rf"{LEFT_OUT}q_norm\.weight.*\. Merge adapters first", {"add": "q_norm.weight"}),
        ("qwen3", f"{LEFT_OUT}sinks", {"add": "sinks"}),
        ("gpt_oss", rf"{LEFT_OUT}q_proj\.lora_A\.weight", {"add": "q_proj.lora_A.weight"}),
        ("deepseek_v3", rf"{LEFT_OUT}q_norm\.weight", {"add": "q_norm.weight"}),
        ("deepseek_v3", f"{LEFT_OUT}kv_b_proj.weight_scale_inv.*{CONVERT}", {"add": "kv_b_proj.weight_scale_inv"}),
        ("qwen3", r"q_norm.weight: expected \(10,\), got \(42,\). Does the config", {"add": "q_norm.weight"}),
        ("deepseek_v3", r"kv_b_proj.weight: expected \(90, 13\), got \(42,\). Does the c", {"add": "kv_b_proj.weight"}),
        ("llama", r"weight of the query under 'layers.1.self_attn.': .*\(80, 42\)", {"num_attention_heads": 8}),
        ("llama", r"weight of the key .*: expected \(30, 42\), got \(20, 42\)", {"num_key_value_heads": 3}),
        (
            "llama",
            r"config: expected a configuration with these biases, got none for q_proj",
            {"attention_bias": False},
        ),
        ("qwen3", r"got no layers.1.self_attn.q_proj.bias, layers.1.self_attn.k_proj.bias", {"attention_bias": True}),
        ("gpt_oss", r"weight of the key .*: expected \(30, 42\)", {"num_attention_heads": 4, "head_dim": 15}),
        ("gpt_neox", r"query_key_value.weight: expected 225 rows, got \(240, 80\)", {"hidden_size": 75}),
    ],
    ArgumentError: [
        ("llama", r"config: expected the setting rope_parameters, .*llama.* SimpleNamespace", {"rope_parameters": ...}),
        ("llama", r"config: expected the setting num_hidden_layers", {"num_hidden_layers": ...}),
        ("llama", r"rope_type: expected one of default, linear", {"rope_parameters": LONGROPE}),
        ("gemma2", r"got use_bidirectional_attention = True", {"use_bidirectional_attention": True}),
        ("gemma2", r"softcap: expected a number > 0", {"attn_logit_softcapping": 0.0}),
        ("gemma2", r"sliding_window = None", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}),
        ("qwen3", r"layer_types\[1\] full_att.*, .* got 'chunked", {"layer_types": ["chunked_attention"] * 3}),
        ("qwen3", r"layer_types\[1\] full_attention, .* got None", {"layer_types": ["full_attention"]}),
        ("deepseek_v3", "config: expected the setting v_head_dim, .*deepseek_v3", {"v_head_dim": ...}),
        ("deepseek_v3", EVERY_HEAD, {"num_key_value_heads": 1}),
        ("deepseek_v3", "rope_type: expected one of default, ", {"rope_parameters": LONGROPE}),
    ],
}


@pytest.mark.parametrize(
    ("error", "name", "text", "changes"), [(error, *row) for error, rows in REFUSED.items() for row in rows]
)
def test_weights_and_settings_that_do_not_fit(
    models: dict[str, Any], error: type[Exception], name: str, text: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(error, match=text.format(name, r"layers\.1\.self_attn\.")):
        read(models[name], 1, **changes)
    if changes.keys() & {"add", "drop"}:
        read(models[name], 0, **changes)


def test_the_page_about_decoders_has_every_model_that_loads() -> None:
    page = (Path(__file__).parents[2] / "docs" / "en" / "decoders.md").read_text(encoding="utf-8")
    table = page.split("| `model_type` |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == KNOWN.split(", ")
