"""Whether a difference is rounding: the same observation for other random parameters, beside float64."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable

from .building import build
from .observing import GENERATION
from .reference import Reference, by_route, observe
from .results import ON, Finding

__all__ = ["redrawn"]

DRAWS = 5

#: By tensor, how far ours, and eager attention's or SDPA's, are from float64.
Errors = tuple[dict[str, float], dict[str, float]]


def redrawn(differences: list[Finding], reference: Reference) -> list[Finding]:
    """The differences, with `Finding.redrawn` where nothing explains them yet and they could be rounding."""
    errors = functools.cache(functools.partial(_errors, reference))
    return [
        found
        if found.explained or found.value >= ON or found.observation == GENERATION
        else dataclasses.replace(found, redrawn=_ratio(found, errors))
        for found in differences
    ]


def _ratio(found: Finding, errors: Callable[[str, str], list[Errors]]) -> float | None:
    """The median error against float64, divided by that of eager attention or SDPA; None where there is no number."""
    without_padding = found.observation.split(",")[0]  # with padding, some models give NaN in float64
    for name in dict.fromkeys((found.observation, without_padding)):
        try:
            draws = errors(found.route, name)
        except Exception:  # what it cannot compute, it cannot explain
            continue
        ratios = [ours.get(found.text, math.inf) / (theirs.get(found.text) or math.nan) for ours, theirs in draws]
        if all(map(math.isfinite, ratios)):
            return statistics.median(ratios)
    return None


def _errors(reference: Reference, route: str, name: str) -> list[Errors]:
    found: list[Errors] = []
    for draw in range(1, DRAWS + 1):
        eager = build(reference.architecture, draw)
        other = Reference(reference.architecture, eager, reference.inputs, reference.implementation)
        model, _ = by_route(route, other)
        found.append(other.errors(name, observe(name, model, reference.inputs)))
    return found
