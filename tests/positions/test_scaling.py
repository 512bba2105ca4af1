"""Every scaling against transformers, in float32 and float64.

`tests/checkpoints/` compares the pairs of other architectures.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from clearhead.errors import ArgumentError, DTypeError
from clearhead.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    YarnScaling,
    rotary_from_config,
)
from tests.support.positions_oracle import BATCH, HEAD_DIM, HEADS, KV_HEADS, states, turn

MAXIMUM = 61  # max_position_embeddings

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "large base": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 601},
    "yarn as in gpt-oss": {
        **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "yarn as in DeepSeek": {
        **{"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "yarn, attention factor": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 211, "attention_factor": 0.77},
    },
    "yarn, short original": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 5},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 211, "rope_theta": 500000.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}


def llama_config(name: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAXIMUM,
        rope_parameters={"rope_theta": 10000.0, **SETTINGS[name]},
    )


def from_config(config: LlamaConfig) -> Rotary:
    return rotary_from_config(config.rope_parameters, HEAD_DIM, max_position_embeddings=MAXIMUM)


#: At 30,011 an error in the last bit of a frequency is an angle of 1e-3.
LONG = [(name, 30_011) for name in ("default", "large base", "linear", "dynamic")]


@pytest.mark.parametrize(("name", "start"), [(name, start) for name in SETTINGS for start in (0, 37)] + LONG)
def test_queries_and_keys_are_rotated_as_in_llama(name: str, start: int) -> None:
    config = llama_config(name)
    q, k = states(13)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, torch.arange(start, start + 13).expand(BATCH, -1))
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(from_config(config)(q, k, start), expected, rtol=0, atol=1e-6)


@pytest.fixture(name="in_float64")
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers computes in float32, in float64."""
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)


@pytest.mark.parametrize("name", [name for name, settings in SETTINGS.items() if settings["rope_type"] != "default"])
@pytest.mark.usefixtures("in_float64")
def test_frequencies_agree_with_transformers_in_float64(name: str) -> None:
    config = llama_config(name)
    reached = 7 * MAXIMUM
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[SETTINGS[name]["rope_type"]](config, seq_len=reached)
    assert frequencies.dtype == torch.float64
    q, k = states(1, dtype=torch.float64)
    positions = torch.full((BATCH, 1), reached - 1)
    expected = magnitude * turn(q, positions, frequencies.tolist())
    turned, _ = from_config(config)(q, k, positions)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-12)


def test_a_factor_of_one_changes_nothing() -> None:
    q, k = states(13)
    expected = Rotary(HEAD_DIM)(q, k, 5)
    for scaling in (LinearScaling(1), DynamicNTKScaling(1, 18), YarnScaling(1, 5), Llama3Scaling(1, 5)):
        torch.testing.assert_close(Rotary(HEAD_DIM, scaling=scaling)(q, k, 5), expected, rtol=0, atol=1e-6)


def test_dynamic_scaling_follows_the_longest_position_of_the_call() -> None:
    rotary = Rotary(HEAD_DIM, scaling=DynamicNTKScaling(2.0, 11))
    q, k = states(7)
    positions = torch.tensor([[-1, -1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [14, 15, 16, 17, 18, 19, 20]])
    together, _ = rotary(q, k, positions)
    alone, _ = rotary(q[1:2], k[1:2], positions[1:2])
    assert not torch.allclose(together[1:2], alone)  # item 1 is turned as item 2's length says
    longest, _ = rotary(q[2:], k[2:], positions[2:])
    torch.testing.assert_close(together[2:], longest)
    within, _ = rotary(q[:2], k[:2], positions[:2])
    torch.testing.assert_close(within, Rotary(HEAD_DIM)(q[:2], k[:2], positions[:2])[0])


def test_a_scaling_of_ones_own() -> None:
    class Frozen(Scaling):
        def frequencies(self, base, size, length, dtype, device):
            return torch.zeros(size // 2, dtype=dtype, device=device)

    q, k = states(7)
    turned, _ = Rotary(HEAD_DIM, scaling=Frozen())(q, k, 100)
    assert torch.equal(turned, q)


# `rotary_from_config`: the settings of configurations, and the errors of incomplete ones.


def test_without_settings_it_is_the_plain_embedding() -> None:
    for settings in (None, {}, {"rope_type": "default", "rope_theta": None}):
        rotary = rotary_from_config(settings, 64)
        assert (rotary.base, rotary.size, rotary.scaling, rotary.interleaved) == (10000.0, 64, None, False)


def test_base_fraction_and_pairs() -> None:
    rotary = rotary_from_config({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, 64, interleaved=True)
    assert (rotary.base, rotary.size, rotary.interleaved) == (5e5, 32, True)


ORIGINAL = {"original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0}
BOUNDS = {"low_freq_factor": 1.5, "high_freq_factor": 5.0}
READINGS: dict[str, tuple[dict[str, object], int | None, Scaling]] = {
    "linear": ({"rope_type": "linear", "factor": 2.0}, None, LinearScaling(2.0)),
    "the older key": ({"type": "linear", "factor": 2.0}, None, LinearScaling(2.0)),
    "dynamic, present": ({"rope_type": "dynamic", "factor": 2.0, **ORIGINAL}, 2048, DynamicNTKScaling(2.0, 2048)),
    "dynamic, original": ({"rope_type": "dynamic", "factor": 2.0, **ORIGINAL}, None, DynamicNTKScaling(2.0, 512)),
    "yarn": ({**YARN, **ORIGINAL, "truncate": False}, 2048, YarnScaling(4.0, 512, truncate=False)),
    "yarn, factor from the lengths": ({**YARN, "factor": None, **ORIGINAL}, 2048, YarnScaling(4.0, 512)),
    "yarn, length from the maximum": (YARN, 2048, YarnScaling(4.0, 2048)),
    "yarn, mscales": ({**YARN, "mscale": 1, "mscale_all_dim": 1}, 2048, YarnScaling(4.0, 2048, attention_factor=1.0)),
    "yarn, one mscale": ({**YARN, "mscale": 0.7}, 2048, YarnScaling(4.0, 2048)),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, **BOUNDS}, 2048, Llama3Scaling(8.0, 2048, 1.5, 5.0)),
}


@pytest.mark.parametrize("name", READINGS)
def test_settings_become_a_scaling(name: str) -> None:
    settings, maximum, scaling = READINGS[name]
    assert rotary_from_config(settings, 64, max_position_embeddings=maximum).scaling == scaling


ERRORS: dict[str, tuple[object, str]] = {
    "unknown type": ({"rope_type": "longrope"}, "rope_type: expected one of default, linear, dynamic, yarn, llama3"),
    "missing factor": ({"rope_type": "linear"}, "factor: expected a number, which rope_type 'linear' needs, got none"),
    "missing length": ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings: expected a number"),
    "missing maximum": ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings: expected a number, which"),
    "missing bound": ({"rope_type": "llama3", "factor": 2.0, **ORIGINAL}, "low_freq_factor: expected a number, which"),
    "factor below one": ({"rope_type": "linear", "factor": 0.5}, "factor: expected a finite number ≥ 1, got 0.5."),
    "fraction out of range": ({"partial_rotary_factor": 1.5}, "fraction: expected a share in (0, 1], got 1.5."),
    "unknown setting": ({"mrope_axes": 3}, "got mrope_axes. Remove what has no effect in your model"),
    "few pairs": ({"mrope_section": [1, 2]}, "axes: expected the axis of each of the 32 pairs"),
    "a section below 0": ({"mrope_section": [1, -2]}, "mrope_section: expected an int ≥ 0 for each axis, got -2."),
    "setting of another type": ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "got beta_fast."),
    "length of another kind": ({**YARN, "max_position_embeddings": 7}, "got max_position_embeddings. Remove"),
    "one for each kind of layer": ({"one": {}, "two": {}}, "of one, two. Give rope_parameters['one'] for such a"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_configuration_that_does_not_fit_is_refused(name: str) -> None:
    settings, text = ERRORS[name]
    with pytest.raises(ArgumentError, match=re.escape(text)):
        rotary_from_config(settings, 64)


def test_settings_that_are_no_dictionary() -> None:
    with pytest.raises(DTypeError, match=r"rope_parameters: expected a dictionary, or None, got str\."):
        rotary_from_config("linear", 64)
    with pytest.raises(DTypeError, match=r"factor: expected a finite number ≥ 1, got str\."):
        rotary_from_config({"rope_type": "linear", "factor": "2"}, 64)
