"""A census as files: safetensors for the whole of it, JSON for readers."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from ..._version import __version__
from ...errors import CheckpointError
from ...plot._files import whole_file
from ._counting import Counted
from ._metrics import METRICS, NAMES
from ._moments import Moments
from ._result import Census

_FORMAT = "clearhead census 1"
_SUMS = ("mean", "spread", "lowest", "highest")


def save(census: Census, path: Path) -> None:
    """See `Census.save`."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for place, moments in enumerate(census.layers.values()):
        tensors |= {f"{place}.{each.name}": getattr(moments, each.name).contiguous() for each in fields(Moments)}
    for name, column in census.columns.items():
        tensors |= {f"{place}.column.{name}": x.contiguous() for place, x in enumerate(column.values())}
    about = {
        "format": _FORMAT,
        "layers": list(census.layers),
        "columns": list(census.columns),
        "metrics": NAMES,
        "counted": asdict(census.counted),
        **{name: getattr(census, name) for name in ("texts", "tokens", "batches")},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        save_file(tensors, file, metadata={"census": json.dumps(about)})


def load(path: Path) -> Census:
    """See `Census.load`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("census", "{}"))
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(path.name, expected="a file that Census.save wrote", got=str(error)) from error
    if about.get("format") != _FORMAT or tuple(about["metrics"]) != NAMES:
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
    counted = Counted(**{**about["counted"], "special": tuple(about["counted"]["special"])})
    return Census(layers, counted, about["texts"], about["tokens"], about["batches"], columns)


def index_of(census: Census) -> dict[str, Any]:
    """See `Census.as_json`."""
    numbers = {metric: {name: getattr(census, name)(metric) for name in (*_SUMS, "count")} for metric in NAMES}
    kinds = {(head.layer, head.head): [] for heads in census.kinds().values() for head in heads}
    for kind, heads in census.kinds().items():
        for head in heads:
            kinds[head.layer, head.head].append(kind)
    heads = [
        {
            "layer": place,
            "module": layer,
            "head": head,
            "kinds": kinds.get((layer, head), []),
            "metrics": {
                metric: {name: _number(of_layers[layer][head]) for name, of_layers in each.items()}
                for metric, each in numbers.items()
            },
            "columns": {name: _number(column[layer][head]) for name, column in census.columns.items()},
        }
        for place, (layer, moments) in enumerate(census.layers.items())
        for head in range(moments.count.shape[1])
    ]
    return {
        "clearhead": __version__,
        **{name: getattr(census, name) for name in ("texts", "tokens", "batches")},
        **asdict(census.counted),
        "metrics": [metric._asdict() for metric in METRICS],
        "heads": heads,
    }


def write(census: Census, folder: Path) -> None:
    """See `Census.write`."""
    (folder / "heads").mkdir(parents=True, exist_ok=True)
    index = index_of(census)
    for head in index["heads"]:
        place = head["layer"], head["head"]
        head["file"] = "heads/layer-{}-head-{}.json".format(*place)
        strongest = {metric: [each._asdict() for each in census.strongest(metric, *place)] for metric in census.metrics}
        _write(folder / head["file"], {**{name: head[name] for name in ("layer", "module", "head")}, **strongest})
    _write(folder / "index.json", index)


def _write(path: Path, data: object) -> None:
    with whole_file(path) as file:
        file.write_text(json.dumps(data, ensure_ascii=True, allow_nan=False) + "\n", encoding="utf-8")


def _number(value: Tensor) -> float | int | None:
    """A number as JSON has it; ``None`` for NaN."""
    number = value.item()
    return None if number != number else number
