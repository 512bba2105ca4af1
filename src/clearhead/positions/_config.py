"""`rotary_from_config`: a `Rotary` from the settings of a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._checks import flag, integer, is_finite, items, number, shown
from ..errors import ArgumentError, DTypeError
from ._checks import factor_at_least_one, positive
from ._rotary import Rotary
from ._scaling import DynamicNTKScaling, LinearScaling, Llama3Scaling, Scaling, YarnScaling

_ANY = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_OF_AXES = {"mrope_section", "mrope_interleaved"}
_OF_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
#: The settings that each rope_type needs, in the order of the arguments of its scaling.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_SCALINGS = {"linear": LinearScaling, "dynamic": DynamicNTKScaling, "llama3": Llama3Scaling}


def rotary_from_config(
    rope_parameters: Mapping[str, Any] | None,
    head_dim: int,
    *,
    max_position_embeddings: int | None = None,
    interleaved: bool = False,
) -> Rotary:
    """Make the `Rotary` that a transformers configuration describes.

    Args:
        rope_parameters: ``config.rope_parameters`` of transformers 5 (``rope_scaling`` before it): ``rope_type`` (one
            of default, linear, dynamic, yarn and llama3) with its settings, ``rope_theta`` (default 10000) and
            ``partial_rotary_factor`` (default 1). ``mrope_section`` and ``mrope_interleaved`` become axes. If it has
            one dictionary per layer type, pass the one of your layer. ``None`` means unscaled.
        head_dim: D.
        max_position_embeddings: ``config.max_position_embeddings``: the original length of dynamic, and the default of
            ``original_max_position_embeddings`` of yarn and llama3.
        interleaved: as for `Rotary`; configurations do not contain it. Default False.

    Returns:
        A `Rotary`. YaRN's ``mscale`` and ``mscale_all_dim`` become its attention factor. Models of the DeepSeek family
        also multiply the scale of their scores by ``mscale_all_dim``; the rotary embedding does not contain this.

    Raises:
        ArgumentError: for an unknown ``rope_type``, or a missing, unknown or invalid setting.
        DTypeError: for settings of another type.

    Example:
        >>> from clearhead.positions import rotary_from_config
        >>> rotary_from_config({"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}, head_dim=64)
        Rotary(head_dim=64, base=500000, scaling=LinearScaling(factor=4.0))
    """
    if rope_parameters is not None and not isinstance(rope_parameters, Mapping):
        got, fix = type(rope_parameters).__name__, "Give config.rope_parameters."
        raise DTypeError("rope_parameters", expected="a dictionary, or None", got=got, fix=fix)
    settings = {key: value for key, value in (rope_parameters or {}).items() if value is not None}
    rope_type = _rope_type(settings)
    _require_known(settings, rope_type)
    _require_numbers(settings)
    if max_position_embeddings is not None:
        integer("max_position_embeddings", max_position_embeddings, least=1)
    return Rotary(
        head_dim,
        base=settings.get("rope_theta", 10000.0),
        fraction=settings.get("partial_rotary_factor", 1.0),
        interleaved=interleaved,
        scaling=_scaling(rope_type, settings, max_position_embeddings),
        axes=_axes(settings),
    )


def _axes(settings: dict[str, Any]) -> list[int] | None:
    """The axis of each pair. Interleaved axes take turns as long as they have pairs, and the first takes the rest."""
    section = settings.get("mrope_section")
    if section is None:
        return None
    if not settings.get("mrope_interleaved"):
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    turns = [pair % len(section) for pair in range(sum(section))]
    return [axis if pair < len(section) * section[axis] else 0 for pair, axis in enumerate(turns)]


def _rope_type(settings: dict[str, Any]) -> str:
    nested = [key for key, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        got = f"a dictionary for each of {', '.join(nested)}"
        fix = f"Give rope_parameters[{nested[0]!r}] for such a layer."
        raise ArgumentError("rope_parameters", expected="the settings of one kind of layer", got=got, fix=fix)
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _NEEDED:
        raise ArgumentError("rope_type", expected=f"one of {', '.join(_NEEDED)}", got=shown(rope_type))
    return rope_type


def _require_known(settings: dict[str, Any], rope_type: str) -> None:
    """Raise for unknown settings, because they could change the outputs of the model."""
    known = _ANY | _OF_AXES | {*_NEEDED[rope_type]} - {"max_position_embeddings"}
    if rope_type == "yarn":
        known |= _OF_YARN
    unknown = sorted(settings.keys() - known, key=str)
    if unknown:
        expected = f"settings of rope_type {rope_type!r}: {', '.join(sorted(known))}"
        got = ", ".join(name if isinstance(name, str) else shown(name) for name in unknown)
        fix = "Remove what has no effect in your model; other kinds of rotary embedding are not supported."
        raise ArgumentError("rope_parameters", expected=expected, got=got, fix=fix)


def _require_numbers(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if name in ("truncate", "mrope_interleaved"):
            flag(name, value)
        elif name == "mrope_section":
            fix = "an int ≥ 0 for each axis"
            [integer(name, count, least=0, expected=fix) for count in items(name, value, fix)]
        elif name == "original_max_position_embeddings":
            integer(name, value, least=1)
        elif name == "rope_theta":
            positive(name, value, above=1)
        elif name == "factor":
            factor_at_least_one(value)
        elif name not in ("rope_type", "type"):
            number(name, value, "a finite number", is_finite)


def _scaling(rope_type: str, settings: dict[str, Any], longest: int | None) -> Scaling | None:
    original = settings.get("original_max_position_embeddings")
    # Dynamic scaling compares with the present maximum, and the others with the one in training.
    lengths = {"max_position_embeddings": longest or original, "original_max_position_embeddings": original or longest}
    settings = settings | {name: length for name, length in lengths.items() if length is not None}
    if rope_type == "yarn" and original is not None and longest is not None:
        settings = {"factor": longest / original, **settings}
    for name in _NEEDED[rope_type]:
        if name not in settings:
            expected = f"a number, which rope_type {rope_type!r} needs"
            raise ArgumentError(name, expected=expected, got="none", fix="Give it.")
    needed = [settings[name] for name in _NEEDED[rope_type]]
    if rope_type != "yarn":
        return None if rope_type == "default" else _SCALINGS[rope_type](*needed)
    return YarnScaling(
        *needed,
        beta_fast=settings.get("beta_fast") or 32.0,
        beta_slow=settings.get("beta_slow") or 1.0,
        attention_factor=_attention_factor(settings),
        truncate=settings.get("truncate", True),
    )


def _attention_factor(settings: dict[str, Any]) -> float | None:
    attention_factor, factor = settings.get("attention_factor"), settings["factor"]
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if attention_factor is not None or not mscale or not all_dim or factor < 1:
        return attention_factor
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
