"""Which mechanisms of attention a configuration turns on, by the fields that say so, and what ignores each.

A mechanism is on only if the output changes by more than `results.ON` when it is ignored. Those that transformers hands
to the attention function are ignored by leaving the keyword out; others by another value of their field.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, final

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from .building import construct, copy_hidden_buffers, with_config
from .inputs import Inputs
from .observing import outputs
from .results import first_line
from .types import Architecture

__all__ = ["KEYWORDS", "MECHANISMS", "Mechanism", "effects"]

_FAR = 4096


@final
@dataclass(frozen=True)
class Mechanism:
    """One mechanism.

    Args:
        name: what it is.
        field: the names of the configuration's fields that turn it on.
        ignore: from the value of the field, one with which it does nothing.
    """

    name: str
    field: str
    ignore: Callable[[Any], Any]


def _none(kind: str, other: str) -> Callable[[Any], Any]:
    """The list of a field of each layer with one kind replaced."""
    return lambda value: [other if item == kind else item for item in value]


def _all_layers(value: Any) -> Any:
    return type(value)(range(_FAR // 64))


#: Fields of configurations, all in transformers' configuration classes.
MECHANISMS = (
    Mechanism(
        "window", r"^(sliding_window(_size)?|attention_window_size|local_attention(_window_len)?)$", lambda _: _FAR
    ),
    Mechanism("window", r"^keep_window_size$", lambda _: _FAR),
    Mechanism("windows of layers", r"^sliding_windows$", lambda value: [[_FAR, _FAR]] * len(value)),
    Mechanism("window of patches", r"^(fullatt_block_indexes|global_attn_indexes)$", _all_layers),
    Mechanism("window of patches", r"^window_block_indices$", lambda _: []),
    Mechanism("chunk", r"^attention_chunk_size$", lambda _: _FAR),
    Mechanism("soft-cap", r"^(attn_logit_softcapping|(conf_)?attention_logit_cap)$", lambda _: 1e6),
    Mechanism("selected keys", r"^(index_topk|indexer_budget)$", lambda _: 64),
    Mechanism("selected blocks", r"^index_topk_blocks$", lambda _: 64),
    Mechanism("shared selection", r"^indexer_types$", _none("shared", "full")),
    Mechanism("keys of earlier layers", r"^num_kv_shared_layers$", lambda _: 0),
    Mechanism("keys of earlier layers", r"^kv_source_layers$", lambda value: list(range(len(value)))),
    Mechanism("keys as values", r"^attention_k_eq_v$", lambda _: False),
    Mechanism("temperature", r"^attn_temperature_tuning$", lambda _: False),
    Mechanism("scale of values", r"^attention_value_scale$", lambda _: 1.0),
    Mechanism("scale of scores", r"^(attention_multiplier|query_pre_attn_scalar)$", lambda value: 4 * value),
    Mechanism("no positions", r"^no_rope_layers$", lambda value: [1] * len(value)),
    Mechanism("slopes", r"^alibi$", lambda _: False),
    Mechanism("gate", r"^use_attention_gate$", lambda _: False),
)
#: What transformers hands to the attention function of a layer.
KEYWORDS = {
    "softcap": "soft-cap",
    "sinks": "sinks of queries",
    "position_bias": "bias of positions",
}


def effects(architecture: Architecture, model: PreTrainedModel, inputs: Inputs) -> dict[str, float | str]:
    """By mechanism and field, how much ignoring it changes the outputs; a text where it cannot be ignored."""
    expected = _first(outputs(model, inputs, ""))
    found: dict[str, float | str] = {}
    for mechanism, path, config in _ignoring(model.config):
        key = f"{mechanism.name}: {path}"
        try:
            other = construct(architecture, config, "eager")
            other.load_state_dict(model.state_dict(), strict=False)
            copy_hidden_buffers(model, other)
            found[key] = _change(_first(outputs(other, inputs, "")), expected)
        except Exception as error:
            found[key] = first_line(error)
    if (other := _without_sinks(model)) is not None:
        found["sinks: sinks"] = _change(_first(outputs(other, inputs, "")), expected)
    for keyword, name in KEYWORDS.items():
        with _without(keyword) as passed:
            actual = _first(outputs(model, inputs, ""))
        if passed:
            found[f"{name}: {keyword}"] = _change(actual, expected)
    return found


def _without_sinks(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model with sinks so low that no weight is left for them; ``None`` if it has none."""
    if not any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return None
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-1e4)
    return other


def _first(observed: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(observed.values()))


def _change(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max())


def _ignoring(config: PreTrainedConfig) -> Iterator[tuple[Mechanism, str, PreTrainedConfig]]:
    """Each mechanism that a configuration, or a part of it, has on, with a configuration that ignores it."""
    for path, part in with_config(config):
        part.allow_global_per_layer_attribute_access = True  # some fields vary between layers
        for field in fields(part):
            value = getattr(part, field.name, None)
            for mechanism in MECHANISMS:
                if not re.search(mechanism.field, field.name) or (not value or value == -1):
                    continue
                if (other := mechanism.ignore(value)) == value:
                    continue
                changed = copy.deepcopy(config)
                inner = dict(with_config(changed))[path]
                setattr(inner, field.name, other)
                if field.name == "local_attention" and hasattr(inner, "sliding_window"):
                    inner.sliding_window = other  # computed from it
                yield mechanism, f"{path}.{field.name}".lstrip("."), changed


@contextmanager
def _without(keyword: str) -> Iterator[list[str]]:
    """Leave a keyword out of the calls of eager attention; the list names the layers that passed one."""
    get_interface, passed = AttentionInterface.get_interface, list[str]()

    def get(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attend = get_interface(self, name, default)

        def attend_without(module: Any, *args: Any, **options: Any) -> Any:
            if options.get(keyword) is not None:
                passed.append(type(module).__name__)
                options[keyword] = None
            return attend(module, *args, **options)

        return attend_without

    AttentionInterface.get_interface = get  # type: ignore[method-assign]
    try:
        yield passed
    finally:
        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
