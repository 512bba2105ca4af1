"""What one query of a vision model looks at: its weights on the patches, and how far they exceed the even weight."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from torch import Tensor

from .._checks import index, integer, shown
from .._statistics.patch_layout import PatchLayout
from .._statistics.recorded import Recorded
from ..errors import ArgumentError
from ._language import say
from ._scale import scale_end

Query = int | str | tuple[int, int]

#: Ends of the colour scale, as multiples of the even weight.
ENDS = (5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0)


def looks_of(rec: Recorded, name: str, layout: PatchLayout, query: Query | None, place: tuple[int, int]) -> Tensor:
    """The weights of the query in every head, (H, rows, columns)."""
    call, item = place
    number = query_number(layout, query)
    queries = slice(len(layout.prefix), None) if number is None else [number]
    layer_record = rec[name][call]
    weights = rec.weights(name, None, queries, call)[item, list(layer_record.heads)].float().cpu().mean(1)  # (H, S)
    return weights[:, len(layout.prefix) :].unflatten(1, layout.grid)


def query_number(layout: PatchLayout, query: Query | None) -> int | None:
    """The number of a query's row; ``None`` for the mean over the patches."""
    names = list(layout.queries or layout.names())
    if query is None:
        return 0 if layout.queries or layout.prefix else None
    if isinstance(query, str):
        if query not in names:
            known = ", ".join([*layout.prefix, "patch 0, 0", "…"]) if layout.queries is None else ", ".join(names)
            raise ArgumentError("query", expected=f"one of {known}", got=shown(query))
        return names.index(query)
    if isinstance(query, (tuple, list)):
        if len(query) != 2 or layout.queries is not None:
            raise ArgumentError("query", expected="(row, column) of a patch", got=shown(query))
        row, column = (
            integer("query", at, least=0, most=most - 1) for at, most in zip(query, layout.grid, strict=True)
        )
        return len(layout.prefix) + row * layout.grid[1] + column
    return index("query", query, len(names))


def query_name(layout: PatchLayout, query: Query | None) -> str:
    """The query in words."""
    number = query_number(layout, query)
    if number is None:
        return say("a patch, on average,")
    name = (layout.queries or layout.names())[number]
    return say("the {0} token", name) if name in layout.prefix and " " not in name else name


def in_order(weights: Tensor, places: Tensor) -> Tensor:
    """Where along the last dimension the weights lie from the largest to the smallest, in four digits.

    Equal weights are in the order of their `places`, as on the page.

    Example:
        >>> import torch
        >>> in_order(torch.tensor([0.1, 0.20001, 0.2]), torch.tensor([0, 2, 1])).tolist()
        [2, 1, 0]
    """
    by_place = places.argsort(-1)
    digits = (weights * 10_000).round().gather(-1, by_place)
    return by_place.gather(-1, digits.argsort(dim=-1, descending=True, stable=True))


def even_weight(layout: PatchLayout) -> float:
    """The weight of each key if all are alike."""
    return 1 / layout.length


def end_of(looks: Sequence[Tensor], layouts: Sequence[PatchLayout]) -> float:
    """Where the colour scale of these weights ends, as a multiple of the even weight."""
    return scale_end([each / even_weight(layout) for each, layout in zip(looks, layouts, strict=True)], ENDS)


def levels_of(weights: Tensor, layout: PatchLayout, end: float) -> Tensor:
    """Colour values in [0, 1]: 0 up to the even weight, 1 from `end` times it, and in between after the logarithm.

    A head that attends to all keys alike is blank, and so is one that attends to other tokens than patches.

    Example:
        >>> import torch
        >>> layout = PatchLayout(("class",), (1, 3), (8, 8), (8, 24))
        >>> levels_of(torch.tensor([[0.1, 0.25, 0.5]]), layout, end=4)
        tensor([[0.0000, 0.0000, 0.5000]])
    """
    return ((weights / even_weight(layout)).clamp(min=1).log() / log(end)).clamp(max=1)
