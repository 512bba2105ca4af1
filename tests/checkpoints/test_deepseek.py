"""What is read of DeepSeek's latent attention, and refused; its results are in the tests of all architectures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead._latent import MultiHeadLatentAttention
from clearhead.checkpoints import from_transformers, layers_from_transformers
from clearhead.errors import ArgumentError, CheckpointError

from .architectures import DEEPSEEK, deepseek, randomised

PREFIX = "layers.0.self_attn."


def model_of(name: str) -> nn.Module:
    return randomised(deepseek(name))


def loaded(model: nn.Module, layer: int) -> MultiHeadLatentAttention:
    ours = from_transformers(model.state_dict(), layer, config=model.config).eval()
    assert isinstance(ours, MultiHeadLatentAttention)
    return ours


@pytest.mark.parametrize("name", ["yarn", "v2"])
def test_through_the_door_for_all_models(name: str) -> None:
    model, x = model_of(name), torch.randn(2, 3, 35)
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


def state_and_config(**settings: Any) -> tuple[dict[str, Tensor], Any]:
    model = model_of("low-rank queries")
    state = model.get_submodule("layers.0.self_attn").state_dict(prefix=PREFIX)
    return state, SimpleNamespace(**(model.config.to_dict() | settings))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
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
        from_transformers(state, 0, config=config)
    assert str(raised.value).startswith(problem)


def test_a_configuration_without_a_setting() -> None:
    state, config = state_and_config()
    del config.v_head_dim
    with pytest.raises(
        ArgumentError, match="config: expected the setting v_head_dim, as configurations of deepseek_v3"
    ):
        from_transformers(state, 0, config=config)


def test_weights_that_are_not_the_configurations() -> None:
    state, config = state_and_config()
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight: expected \(90, 13\), got \(3, 2\)\. Does the config"):
        from_transformers(state | {PREFIX + "kv_b_proj.weight": torch.zeros(3, 2)}, 0, config=config)
    absent = {PREFIX + "kv_a_layernorm.weight", PREFIX + "q_b_proj.weight"}
    with pytest.raises(CheckpointError, match=r"self_attn\.', got no .*q_b_proj\.weight, .*kv_a_layernorm\.weight"):
        from_transformers({name: state[name] for name in state.keys() - absent}, 0, config=config)
    with pytest.raises(CheckpointError, match=r"got .*q_norm\.weight\."):
        from_transformers(state | {PREFIX + "q_norm.weight": torch.zeros(7)}, 0, config=config)
    scales = {PREFIX + "kv_b_proj.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(CheckpointError, match=r"The weights are quantised: convert them to bfloat16 first\."):
        from_transformers(state | scales, 0, config=config)
    old = {PREFIX + "rotary_emb.inv_freq": torch.ones(3)}
    assert isinstance(from_transformers(state | old, 0, config=config), MultiHeadLatentAttention)


def test_yarns_factor_may_follow_from_the_lengths() -> None:
    """DeepSeek's own files leave it out now and then; 64 / 16 positions make a factor of 4."""
    rope = {name: value for name, value in DEEPSEEK["yarn, halves"]["rope_parameters"].items() if name != "factor"} | {
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    state, config = state_and_config(rope_parameters=rope)
    _, told = state_and_config(rope_parameters=rope | {"factor": 4.0})
    scales = [from_transformers(state, 0, config=each).scale for each in (config, told)]
    assert scales[0] == scales[1] > 13**-0.5
