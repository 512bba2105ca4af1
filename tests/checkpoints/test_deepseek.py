"""DeepSeek's latent attention in transformers: theirs and ours on the same inputs, whole, padded and step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from clearhead import masks
from clearhead._latent import MultiHeadLatentAttention
from clearhead.checkpoints import layers_from_transformers
from clearhead.checkpoints._deepseek import latent_from_transformers
from clearhead.errors import ArgumentError, CheckpointError

from .architectures import LENGTHS, PROMPT, VOCABULARY, B, L, assert_close, marks, positions_of, randomised, token_ids
from .architectures import watching as watching_any

LAYERS = (0, 1)
PREFIX = "layers.{layer}.self_attn."
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 35,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,  # no experts
    "intermediate_size": 29,
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 11,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
#: What differs between models: DeepSeek-V3 has a latent for queries and YaRN with both mscales.
MODELS: dict[str, dict[str, Any]] = {
    "plain queries": {"q_lora_rank": None},
    "low-rank queries": {"q_lora_rank": 17},
    "halves": {"q_lora_rank": 17, "rope_interleave": False},
    "halves, plain queries": {"q_lora_rank": None, "rope_interleave": False},
    "biases": {"q_lora_rank": 17, "attention_bias": True, "attention_dropout": 0.1},
    "yarn": {"q_lora_rank": 17, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn, two mscales": {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn, halves": {"q_lora_rank": 17, "rope_interleave": False, "rope_parameters": YARN},
    # Their rotary part turns complex numbers, which takes even sizes around it.
    "v2": {
        "q_lora_rank": 17,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 8,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
}


def model_of(name: str) -> nn.Module:
    classes = (
        (transformers.DeepseekV2Model, transformers.DeepseekV2Config)
        if name == "v2"
        else (transformers.DeepseekV3Model, transformers.DeepseekV3Config)
    )
    config = classes[1](**(SIZES | MODELS[name]))
    config._attn_implementation = "eager"
    return randomised(classes[0](config))


def loaded(model: nn.Module, layer: int) -> MultiHeadLatentAttention:
    return latent_from_transformers(model.config, model.state_dict(), PREFIX.format(layer=layer)).eval()


def watching(model: nn.Module) -> Any:
    name = PREFIX.removesuffix(".")
    return watching_any(model, name, name, LAYERS)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_batch(name: str) -> None:
    model = model_of(name)
    with watching(model) as seen:
        model(input_ids=token_ids())
    for layer in LAYERS:
        with torch.no_grad():
            assert_close(loaded(model, layer)(seen.x[layer][0], mask=masks.causal()), seen.output[layer][0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch(name: str, side: str) -> None:
    model, kept = model_of(name), marks(side)
    with watching(model) as seen:
        model(input_ids=token_ids(), attention_mask=kept, position_ids=positions_of(kept).clamp(min=0))
    real = kept.bool()
    for layer in LAYERS:
        x = seen.x[layer][0].masked_fill(~real[..., None], torch.nan)  # whatever stands in padding
        with torch.no_grad():
            output = loaded(model, layer)(x, mask=masks.causal(), positions=positions_of(kept))
        assert_close(output[real], seen.output[layer][0][real])


@pytest.mark.parametrize("prompt", [1, PROMPT])
@pytest.mark.parametrize("name", MODELS)
def test_prompt_and_steps(name: str, prompt: int) -> None:
    model, ids = model_of(name), token_ids()
    kept_by_them = transformers.DynamicCache(config=model.config)
    parts = ids.split([prompt] + [1] * (L - prompt), 1)
    with watching(model) as seen:
        for part in parts:
            model(input_ids=part, past_key_values=kept_by_them, use_cache=True)
    for layer in LAYERS:
        ours = loaded(model, layer)
        cache = ours.make_cache(B, L)
        for x, expected in zip(seen.x[layer], seen.output[layer], strict=True):
            with torch.no_grad():
                assert_close(ours(x, mask=masks.causal(), cache=cache), expected)
        assert cache.length == L


@pytest.mark.parametrize("name", MODELS)
def test_a_left_padded_prompt_and_steps(name: str) -> None:
    model, kept = model_of(name), marks("left")
    ids, places, prompt = token_ids(), positions_of(kept), L - 4
    kept_by_them = transformers.DynamicCache(config=model.config)
    stops = list(range(prompt, L + 1))
    with watching(model) as seen:
        for start, stop in zip([0, *stops[:-1]], stops, strict=True):
            model(
                input_ids=ids[:, start:stop],
                attention_mask=kept[:, :stop],
                position_ids=places[:, start:stop].clamp(min=0),
                past_key_values=kept_by_them,
                use_cache=True,
            )
    for layer in LAYERS:
        ours = loaded(model, layer)
        cache = ours.make_cache(B, L)
        for number, (x, expected) in enumerate(zip(seen.x[layer], seen.output[layer], strict=True)):
            real = kept[:, :prompt].bool() if number == 0 else torch.ones(B, 1).bool()
            with torch.no_grad():
                # Positions are told once; then every row goes on where it was.
                output = ours(
                    x, mask=masks.causal(), positions=places[:, :prompt] if number == 0 else None, cache=cache
                )
            assert_close(output[real], expected[real])


@pytest.mark.parametrize("name", MODELS)
def test_a_right_padded_prompt_and_steps(name: str) -> None:
    """After the prompt every row goes on where it ended: next to theirs, each row by itself."""
    model, ids, further = model_of(name), token_ids(), torch.randint(VOCABULARY, (B, 3))
    alone = [torch.cat((row[:n], more)) for row, n, more in zip(ids, LENGTHS.tolist(), further, strict=True)]
    xs: dict[int, list[Tensor]] = {layer: [] for layer in LAYERS}
    outputs: dict[int, list[Tensor]] = {layer: [] for layer in LAYERS}
    for row in alone:
        with watching(model) as seen:
            model(input_ids=row[None])
        for layer in LAYERS:
            xs[layer].append(seen.x[layer][0][0])
            outputs[layer].append(seen.output[layer][0][0])
    for layer in LAYERS:
        ours = loaded(model, layer)
        cache = ours.make_cache(B, L + 3)
        padded = nn.utils.rnn.pad_sequence([x[:-3] for x in xs[layer]], batch_first=True)
        with torch.no_grad():
            prompt = ours(padded, mask=masks.causal(), cache=cache)
            cache.crop(LENGTHS)
            steps = [
                ours(torch.stack([x[n - 3] for x in xs[layer]])[:, None], mask=masks.causal(), cache=cache)
                for n in range(3)
            ]
        together = torch.cat(steps, 1)  # (B, 3, E)
        for row, n in enumerate(LENGTHS.tolist()):
            assert_close(torch.cat((prompt[row, :n], together[row])), outputs[layer][row])


@pytest.mark.parametrize("name", ["yarn", "v2"])
def test_through_the_door_for_all_models(name: str) -> None:
    model, x = model_of(name), torch.randn(2, 3, SIZES["hidden_size"])
    for layer, ours in enumerate(layers_from_transformers(model)):
        assert isinstance(ours, MultiHeadLatentAttention)
        assert not ours.training
        assert torch.equal(ours(x), loaded(model, layer)(x))
    scales = {"layers.0.self_attn.kv_b_proj.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(CheckpointError, match="quantised"):
        layers_from_transformers(model.state_dict() | scales, config=model.config)


def test_what_was_read_is_told() -> None:
    ours = loaded(model_of("yarn"), 1)
    report = ours.loaded_from
    assert isinstance(report, str)
    assert "deepseek_v3" in report
    assert "'layers.1.self_attn.'" in report
    assert "kv_b_proj.weight" in report
    assert "YarnScaling" in report
    assert ours.dropout == 0.0
    assert loaded(model_of("biases"), 0).dropout == 0.1


def test_tensors_are_copies_of_their_own_dtype() -> None:
    model = model_of("biases").bfloat16()
    ours = loaded(model, 0)
    theirs = model.get_submodule("layers.0.self_attn.kv_b_proj").weight
    assert ours.kv_up.weight.dtype == torch.bfloat16
    assert ours.kv_up.weight.data_ptr() != theirs.data_ptr()
    assert all(parameter.requires_grad for parameter in ours.parameters())
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))


def test_an_attention_module_by_itself() -> None:
    model = model_of("low-rank queries")
    attention = model.get_submodule("layers.0.self_attn")
    ours, same = latent_from_transformers(model.config, attention.state_dict()).eval(), loaded(model, 0)
    x = torch.randn(2, 3, 35)
    assert torch.equal(ours(x), same(x))


def state_and_config(**settings: Any) -> tuple[dict[str, Tensor], Any]:
    model = model_of("low-rank queries")
    state = model.get_submodule("layers.0.self_attn").state_dict()
    return state, SimpleNamespace(**(model.config.to_dict() | settings))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model_type": "llama"}, "config.model_type: expected one of deepseek_v3, deepseek_v2, got 'llama'."),
        (
            {"num_key_value_heads": 1},
            "config.num_key_value_heads: expected num_attention_heads = 5, for every head has keys of its own, got 1.",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: expected one of default, "),
    ],
)
def test_configurations_of_something_else(settings: dict[str, Any], problem: str) -> None:
    state, config = state_and_config(**settings)
    with pytest.raises(ArgumentError) as raised:
        latent_from_transformers(config, state)
    assert str(raised.value).startswith(problem)


def test_a_configuration_without_a_setting() -> None:
    state, config = state_and_config()
    del config.v_head_dim
    with pytest.raises(
        ArgumentError, match="config: expected the setting v_head_dim, as configurations of deepseek_v3"
    ):
        latent_from_transformers(config, state)


def test_weights_that_are_not_the_configurations() -> None:
    state, config = state_and_config()
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight: expected \(90, 13\), got \(3, 2\)\. Does the config"):
        latent_from_transformers(config, state | {"kv_b_proj.weight": torch.zeros(3, 2)})
    with pytest.raises(CheckpointError, match=r"under 'model\.', got no kv_a_layernorm\.weight, .*q_b_proj\.weight"):
        latent_from_transformers(config, state, "model.")
    with pytest.raises(CheckpointError, match=r"got also q_norm\.weight\."):
        latent_from_transformers(config, state | {"q_norm.weight": torch.zeros(7)})
    scales = {"kv_b_proj.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(CheckpointError, match=r"The weights are quantised: convert them to bfloat16 first\."):
        latent_from_transformers(config, state | scales)
    old = {"rotary_emb.inv_freq": torch.ones(3)}
    latent_from_transformers(config, state | old)


def test_yarns_factor_may_follow_from_the_lengths() -> None:
    """DeepSeek's own files leave it out now and then; 64 / 16 positions make a factor of 4."""
    rope = {name: value for name, value in YARN.items() if name != "factor"} | {"mscale": 1.0, "mscale_all_dim": 1.0}
    state, config = state_and_config(rope_parameters=rope)
    _, told = state_and_config(rope_parameters=rope | {"factor": 4.0})
    assert latent_from_transformers(config, state).scale == latent_from_transformers(told, state).scale > 13**-0.5
