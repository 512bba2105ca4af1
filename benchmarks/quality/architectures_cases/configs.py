"""Tiny configurations: the default one with every size replaced by a small one, through all sub-configurations."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import PreTrainedConfig

from .rules import FIELDS, KEPT, OVERRIDES
from .sizes import FIRST_SPECIAL, VOCABULARY

__all__ = ["small_config"]


LAYERS = 2
#: Fewer layers than this are kept where the layers are of different types.
MOST_LAYERS = 6

_SPECIAL_TOKEN = re.compile(
    r"(_token_id|_token_ids|_token_index|_bos_id|_eos_id|_start_id|_end_id|newline_id|_tokens)$"
)
_LAYER_COUNT = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|encoder_layers|depth)$")


def small_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The default configuration of this class with small sizes.

    Sizes are recognised by the names of fields (`rules.FIELDS`); what these do not reach is in `rules.OVERRIDES`.
    """
    return config_class(**_shrink(config_class(), {}))


def _shrink(config: PreTrainedConfig, tokens: dict[int, int]) -> dict[str, Any]:
    """Keyword arguments of a smaller configuration; `tokens` are the special tokens moved so far."""
    overrides = OVERRIDES.get(config.model_type, {})
    fields = {field.name: field for field in dataclasses.fields(config)}
    smaller: dict[str, Any] = {}
    for name, field in fields.items():
        value = _value(config, name)
        if name in overrides or name in KEPT or value is None or not field.init:
            continue
        if isinstance(value, PreTrainedConfig):
            smaller[name] = {**_shrink(value, tokens), "model_type": value.model_type}
        elif (small := _smaller_value(name, value, tokens)) != field.default:
            smaller[name] = small
    smaller |= overrides
    _fit_heads(config, smaller, fields)
    _cut_layers(config, smaller, fixed=set(overrides))
    _fit_rotary(config, smaller)
    return smaller


def _value(config: PreTrainedConfig, name: str) -> Any:
    config.allow_global_per_layer_attribute_access = True  # some fields vary between layers
    return getattr(config, name, None)


def _fit_heads(config: PreTrainedConfig, smaller: dict[str, Any], fields: dict[str, Any]) -> None:
    """As many key/value heads as query heads where it was so, and the size of a head where nothing else gives it."""
    heads, kv_heads = _value(config, "num_attention_heads"), _value(config, "num_key_value_heads")
    if heads == kv_heads and "num_key_value_heads" in smaller and "num_attention_heads" in smaller:
        smaller["num_key_value_heads"] = smaller["num_attention_heads"]
    if "head_dim" in fields and fields["head_dim"].init and _value(config, "head_dim") is None:
        hidden, count = smaller.get("hidden_size"), smaller.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(count, int):
            smaller.setdefault("head_dim", hidden // count)


def _smaller_value(name: str, value: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, bool):
        return value
    if _SPECIAL_TOKEN.search(name):
        if isinstance(value, int):
            return _small_token(value, tokens)
        if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
            return [_small_token(item, tokens) for item in value]
    for pattern, small in FIELDS:
        if pattern.search(name):
            if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
                return small(value)
            if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
                return type(value)(small(item) for item in value)
            return value
    return value


def _small_token(token: int, tokens: dict[int, int]) -> int:
    """The same small id for the same token, wherever in the configuration it is named."""
    if token < 10:
        return token
    return tokens.setdefault(token, VOCABULARY - 1 - len(tokens) % (VOCABULARY - FIRST_SPECIAL))


def _cut_layers(config: PreTrainedConfig, smaller: dict[str, Any], fixed: set[str]) -> None:
    """Keep the first layers, and one of each type where lists name a type for each layer."""
    names = [name for name in smaller if _LAYER_COUNT.match(name) and isinstance(_value(config, name), int)]
    names += [name for name in ("num_hidden_layers",) if name not in names and name not in fixed]
    for name in names:
        count = _value(config, name)
        if not isinstance(count, int) or count <= LAYERS or name in fixed:
            continue
        lists = {
            key: value
            for key in {field.name for field in dataclasses.fields(config)} - fixed
            if isinstance(value := smaller.get(key, _value(config, key)), (list, tuple)) and len(value) == count
        }
        kept = _typical_layers(list(lists.values()), count)
        for key, value in lists.items():
            smaller[key] = type(value)(value[index] for index in kept)
        if name in smaller or lists:
            smaller[name] = len(kept)


def _typical_layers(lists: list[Any], count: int) -> list[int]:
    kept: list[int] = []
    seen: set[str] = set()
    for index in range(count):
        kind = repr([value[index] for value in lists])
        if kind not in seen and len(kept) < MOST_LAYERS:
            seen.add(kind)
            kept.append(index)
    extra = [index for index in range(count) if index not in kept]
    return sorted(kept + extra[: max(0, LAYERS - len(kept))])


def _fit_rotary(config: PreTrainedConfig, smaller: dict[str, Any]) -> None:
    """Sections of multimodal rotary embeddings have to sum to half of the rotated part of the (now smaller) head."""
    rope = smaller.get("rope_parameters", _value(config, "rope_parameters"))
    if not isinstance(rope, dict):
        return
    everywhere = "mrope_section" in type(config).ignore_keys_at_rope_validation
    if all(isinstance(part, dict) for part in rope.values()):  # one for each type of layers
        smaller["rope_parameters"] = {kind: _with_sections(part, smaller, everywhere) for kind, part in rope.items()}
    else:
        smaller["rope_parameters"] = _with_sections(rope, smaller, everywhere)


def _with_sections(rope: dict[str, Any], smaller: dict[str, Any], everywhere: bool) -> dict[str, Any]:
    if "mrope_section" not in rope and not everywhere:
        return rope
    half = int(smaller.get("head_dim", 8) * rope.get("partial_rotary_factor", 1.0)) // 2
    return {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
