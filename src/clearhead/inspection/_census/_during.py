"""A census of a model in training: a few numbers and one figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..._checks import shown
from ...errors import DTypeError
from .._evaluation import evaluation_mode
from ._result import Census

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A function of a model that takes its census.
TakeCensus = Callable[[nn.Module], Census]

_PER_ROW, _WIDTH, _HEIGHT = 3, 3.4, 2.8  # of a figure: panels, and the inches of one


def values_during(take: TakeCensus, model: nn.Module) -> dict[str, Any]:
    """The scalars and the figure of a census that leaves a model, its modes and the random numbers as they were."""
    model = getattr(model, "_orig_mod", model)  # calls of a compiled model cannot be observed
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), evaluation_mode(model), torch.no_grad():
        found = take(model)
    if not isinstance(found, Census):
        raise DTypeError("census", expected="a function that returns a Census", got=shown(found))
    values = _scalars(found)
    return values | {"census/heads": _figure(found)} if values else values


def _scalars(found: Census) -> dict[str, Any]:
    """For each kind the largest mean of any head, and the number of heads of that kind."""
    values: dict[str, Any] = {}
    for kind, heads in found.kinds().items():
        ranked = found.rank_heads(kind)
        if ranked:
            values |= {f"census/{kind}": ranked[0].weight, f"census/{kind}/heads": float(len(heads))}
    return values


def _figure(found: Census) -> Figure:
    """Layers × heads for each kind that has a mean. It belongs to no window, so that training leaves none open."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in found.kinds() if found.rank_heads(kind)]
    columns = min(_PER_ROW, len(kinds))
    rows = -(-len(kinds) // columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, kind in zip(panels, kinds, strict=False):
        found.plot_heads(kind, ax=axes)
    for axes in panels[len(kinds) :]:
        axes.set_axis_off()
    return figure
