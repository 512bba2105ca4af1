"""Numbers per head as tables: columns beside the metrics of a census, JSON, and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._checks import FLOATS, INTEGERS, shown, strided, with_values
from ..._statistics.recorded import RankedHead
from ...errors import ArgumentError, DTypeError, ShapeError, shape_text

#: Layer → (H,).
Column = dict[str, Tensor]


def column_of(values: object, heads: Mapping[str, int], name_of: Callable[[int | str], str]) -> Column:
    """A column (H,) for each layer, float64, with NaN where `values` has no layer."""
    if not isinstance(values, Mapping):
        raise DTypeError("values", expected="a dictionary {layer: (H,) numbers}", got=shown(values))
    column = {layer: torch.full((count,), float("nan")).double() for layer, count in heads.items()}
    for layer, numbers in values.items():
        expected, place = column[name_of(layer)].shape, f"values[{layer!r}]"
        if with_values(place, strided(place, numbers, dtypes=FLOATS + INTEGERS)).shape != expected:
            raise ShapeError(place, expected=shape_text(expected), got=shape_text(numbers.shape))
        column[name_of(layer)] = numbers.detach().double().cpu()
    return column


def united(columns: Mapping[str, Column], others: Mapping[str, Column]) -> dict[str, Column]:
    """The columns of two censuses. Their numbers cannot be averaged, because nothing says over how much they are."""
    for name in columns.keys() & others.keys():
        mine, theirs = (torch.cat(list(each[name].values())) for each in (columns, others))
        if not torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True):
            fix = "Add it to the merged census, measured over all corpora."
            raise ArgumentError("others", expected=f"the same column {name!r}", got="other numbers", fix=fix)
    return {**others, **columns}


def described(
    heads: Mapping[str, int],
    metrics: Mapping[str, Mapping[str, Column]],
    kinds: Mapping[str, Sequence[RankedHead]],
    columns: Mapping[str, Column],
) -> list[dict[str, Any]]:
    """Every head as a plain object, as `Census.as_json` describes it.

    Args:
        heads: layer → its number of heads.
        metrics: metric → name of a sum → numbers.
        kinds: kind → its heads.
        columns: name → numbers.
    """
    return [
        {
            "layer": place,
            "module": layer,
            "head": head,
            "kinds": [kind for kind, ranked in kinds.items() if any(x[:2] == (layer, head) for x in ranked)],
            "metrics": {
                metric: {name: _plain(numbers[layer][head]) for name, numbers in sums.items()}
                for metric, sums in metrics.items()
            },
            "columns": {name: _plain(column[layer][head]) for name, column in columns.items()},
        }
        for place, (layer, count) in enumerate(heads.items())
        for head in range(count)
    ]


def row_of(head: Mapping[str, Any]) -> dict[str, Any]:
    """A head of `described`, flat: a mean has the name of its metric."""
    row = {name: head[name] for name in ("layer", "module", "head")}
    for metric, numbers in head["metrics"].items():
        row |= {metric if name == "mean" else f"{metric}_{name}": x for name, x in numbers.items()}
    return row | head["columns"]


def _plain(value: Tensor) -> float | int | None:
    """A number as JSON has it; ``None`` for NaN."""
    found = value.item()
    return None if found != found else found
