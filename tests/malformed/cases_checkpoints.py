"""Checkpoints: other names for the same weights."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

import clearhead
from clearhead import checkpoints
from tests.malformed.calls import Call, case


def _state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(9)
    return {f"a.{role}_proj.weight": torch.randn(12, 12, generator=draw) for role in "qkvo"}


@case("checkpoints.load", weight=6, source=("tensors", "checkpoint"))
def _() -> Call:
    given = {"num_heads": 3, "num_kv_heads": 3, "naming": "o_proj", "prefix": "a", "dropout": 0.1, "scale": 0.5}
    return Call(checkpoints.load, source=_state(), **given)


case("checkpoints.load, one tensor", names=tuple(f"a.{role}_proj.weight" for role in "qkvo"), weight=6)(
    lambda: Call(lambda **state: checkpoints.load(state, 3), **_state())
)
case("checkpoints.identify", weight=4)(lambda: Call(checkpoints.identify, source=_state(), naming="o_proj", prefix="a"))
case("checkpoints.save", weight=4)(
    lambda: Call(checkpoints.save, module=clearhead.MultiHeadAttention(12, 3), naming="torch", prefix="a")
)


@functools.cache
def _bloom() -> tuple[Any, dict[str, Any]]:
    config = SimpleNamespace(
        model_type="bloom", hidden_size=12, num_attention_heads=3, num_hidden_layers=1, attention_dropout=0.0
    )
    sizes = {"query_key_value": 36, "dense": 12}
    state = {
        f"h.0.self_attention.{name}.{kind}": torch.randn(rows, 12) if kind == "weight" else torch.randn(rows)
        for name, rows in sizes.items()
        for kind in ("weight", "bias")
    }
    return config, state


@case("checkpoints.from_transformers", weight=4)
def _() -> Call:
    config, state = _bloom()
    return Call(checkpoints.from_transformers, source=dict(state), layer=0, config=config, part="self")


@case("checkpoints.layers_from_transformers", weight=4)
def _() -> Call:
    config, state = _bloom()
    return Call(checkpoints.layers_from_transformers, source=dict(state), config=config, part=None)


@case(
    "checkpoints.from_transformers, its settings",
    arguments=("model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "attention_dropout"),
    model_type="config",
    hidden_size=("config", "source"),
    num_attention_heads=("config", "source"),
)
def _() -> Call:
    config, state = _bloom()

    def load(**settings: Any) -> Any:
        return checkpoints.from_transformers(dict(state), 0, config=SimpleNamespace(**settings))

    return Call(load, **vars(config))


@case("checkpoints.Naming.of_linears")
def _() -> Call:
    def named(**given: Any) -> Any:
        naming = checkpoints.Naming.of_linears(**given)
        return checkpoints.save(clearhead.MultiHeadAttention(12, 3), naming)

    names = {"name": "mine", "query": "q", "key": "k", "value": "v", "output": "o", "description": "mine"}
    return Call(named, **names, square=False, ignored=())
