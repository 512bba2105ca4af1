"""What a page shows of a census: the names of heads, and by which metric each is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..._statistics.recorded import RankedHead
from ...plot._census_page import Kinds
from ._metrics import KINDS, MASSES

ROWS = 3  # strongest texts of a head

#: Layer and head, both by number.
Head = tuple[int, int]


def least_of(threshold: float | None) -> dict[str, float]:
    """Kind → the mean that names a head."""
    return {kind: usual if threshold is None else threshold for kind, usual in KINDS.items()}


def kinds_of(index: Mapping[str, Any], ranked: Mapping[str, Sequence[RankedHead]]) -> Kinds:
    """The heads of `Census.kinds`, with layers by number; `index` is that of `Census.as_json`."""
    places = {head["module"]: head["layer"] for head in index["heads"]}
    return {kind: [(places[each.layer], each.head, each.weight) for each in heads] for kind, heads in ranked.items()}


def telling(index: Mapping[str, Any], kinds: Kinds) -> dict[Head, str]:
    """Head → the first kind that names it, or else its largest mass, but for that of the window, which holds others."""
    named = {place[:2]: kind for kind, ranked in list(kinds.items())[::-1] for place in ranked}
    told: dict[Head, str] = {}
    for head in index["heads"]:
        means = {mass.name: head["metrics"][mass.name]["mean"] for mass in MASSES if mass.name != "window"}
        known = {metric: mean for metric, mean in means.items() if mean is not None}
        place = head["layer"], head["head"]
        told[place] = named.get(place) or max(known, key=lambda metric: known[metric], default="entropy")
    return told
