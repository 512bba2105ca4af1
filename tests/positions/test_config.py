"""`rotary_from_config`: the settings of configurations, and the errors of incomplete ones."""

from __future__ import annotations

import re

import pytest

from clearhead.errors import ArgumentError, DTypeError
from clearhead.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    Scaling,
    YarnScaling,
    rotary_from_config,
)


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
    "yarn, equal mscales": (
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        2048,
        YarnScaling(4.0, 2048, attention_factor=1.0),
    ),
    "yarn, one mscale": ({**YARN, "mscale": 0.7}, 2048, YarnScaling(4.0, 2048)),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, **BOUNDS}, 2048, Llama3Scaling(8.0, 2048, 1.5, 5.0)),
}


@pytest.mark.parametrize("name", READINGS)
def test_settings_become_a_scaling(name: str) -> None:
    settings, maximum, scaling = READINGS[name]
    assert rotary_from_config(settings, 64, max_position_embeddings=maximum).scaling == scaling


ERRORS: dict[str, tuple[object, str]] = {
    "unknown type": (
        {"rope_type": "longrope"},
        "rope_type: expected one of default, linear, dynamic, yarn, llama3, got 'longrope'.",
    ),
    "missing factor": (
        {"rope_type": "linear"},
        "factor: expected a number, which rope_type 'linear' needs, got none. Give it.",
    ),
    "missing length": ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings: expected a number"),
    "missing maximum": ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings: expected a number, which"),
    "missing bound": (
        {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 7, "low_freq_factor": 1.0},
        "high_freq_factor: expected a number, which rope_type 'llama3' needs",
    ),
    "factor below one": ({"rope_type": "linear", "factor": 0.5}, "factor: expected a finite number ≥ 1, got 0.5."),
    "fraction out of range": ({"partial_rotary_factor": 1.5}, "fraction: expected a share in (0, 1], got 1.5."),
    "unknown setting": (
        {"rope_type": "default", "mrope_section": [1, 2]},
        "got mrope_section. Remove what has no effect in your model",
    ),
    "setting of another type": ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "got beta_fast."),
    "one for each kind of layer": (
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
        "got a dictionary for each of full_attention, sliding_attention. Give rope_parameters['full_attention'] for",
    ),
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
