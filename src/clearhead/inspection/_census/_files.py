"""A census as a ``.safetensors`` file, and JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import CheckpointError
from ...plot._files import whole_file
from ._metrics import Counted, Pair
from ._moments import Moments

_FORMAT = "clearhead census 1"


class State(NamedTuple):
    """Everything that a census holds; see `Census`."""

    layers: dict[str, Moments]
    counted: Counted
    texts: int
    tokens: int
    batches: int
    columns: dict[str, dict[str, Tensor]]


def save(state: State, path: Path) -> None:
    """Write a state whole, or not at all."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for place, moments in enumerate(state.layers.values()):
        tensors |= {f"{place}.{each.name}": getattr(moments, each.name).contiguous() for each in fields(Moments)}
    for name, column in state.columns.items():
        tensors |= {f"{place}.column.{name}": x.contiguous() for place, x in enumerate(column.values())}
    counts = {"texts": state.texts, "tokens": state.tokens, "batches": state.batches}
    names = {
        "format": _FORMAT,
        "metrics": state.counted.names,
        "layers": list(state.layers),
        "columns": list(state.columns),
    }
    about = {**names, "counted": asdict(state.counted), **counts}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        save_file(tensors, file, metadata={"census": json.dumps(about)})


def load(path: Path) -> State:
    """Read a state.

    Raises:
        CheckpointError: for a file that `save` did not write.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get("census", "{}"))
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(path.name, expected="a file that Census.save wrote", got=str(error)) from error
    counted: dict[str, Any] = about.get("counted", {})
    special = tuple(counted.pop("special", ()))
    pairs = tuple(Pair(name, tuple(queries), tuple(keys)) for name, queries, keys in counted.pop("pairs", ()))
    settings = Counted(special, pairs=pairs, **counted)
    if about.get("format") != _FORMAT or tuple(about["metrics"]) != settings.names:
        got = about.get("format") or "another file of tensors"
        raise CheckpointError(path.name, expected=f"a file of the format {_FORMAT!r}", got=got)
    layers = {
        name: Moments(*(tensors[f"{place}.{each.name}"] for each in fields(Moments)))
        for place, name in enumerate(about["layers"])
    }
    columns = {
        name: {layer: tensors[f"{place}.column.{name}"] for place, layer in enumerate(layers)}
        for name in about["columns"]
    }
    return State(layers, settings, about["texts"], about["tokens"], about["batches"], columns)


def write(files: dict[str, Any], folder: Path) -> None:
    """Write objects as JSON, by the names of their files."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write_text(json.dumps(data, ensure_ascii=True, allow_nan=False) + "\n", encoding="utf-8")
