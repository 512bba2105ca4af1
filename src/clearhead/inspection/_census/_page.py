"""A census as a page: which heads have a name, and which texts show best what a head does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...plot._census_page import Kinds, StrongRow, census_page
from ...plot._page_maker import Page
from ._metrics import KINDS, MASSES

if TYPE_CHECKING:
    from ._result import Census

ROWS = 3  # of a head

#: Layer and head, both by number.
Head = tuple[int, int]


def kinds_of(found: Census, threshold: float | None) -> Kinds:
    """`Census.kinds` with layers by number."""
    places = {layer: place for place, layer in enumerate(found.layers)}
    return {
        kind: [(places[head.layer], head.head, head.weight) for head in ranked]
        for kind, ranked in found.kinds(threshold).items()
    }


def telling(found: Census, kinds: Kinds) -> dict[Head, str]:
    """Head → the first kind that names it, or else its largest mass, but for that of the window, which holds others."""
    named = {place[:2]: kind for kind, ranked in list(kinds.items())[::-1] for place in ranked}
    means = {mass.name: list(found.mean(mass.name).values()) for mass in MASSES if mass.name != "window"}
    told: dict[Head, str] = {}
    for layer, moments in enumerate(found.layers.values()):
        of_layer = {metric: layers[layer].tolist() for metric, layers in means.items()}
        for head in range(moments.count.shape[1]):
            known = {metric: values[head] for metric, values in of_layer.items() if values[head] == values[head]}
            largest = max(known, key=lambda metric: known[metric], default="entropy")
            told[layer, head] = named.get((layer, head), largest)
    return told


def page_of(
    found: Census,
    rows: Mapping[Head, Sequence[StrongRow]] | None = None,
    *,
    title: str,
    threshold: float | None = None,
    link: str | None = None,
) -> Page:
    """The page of a census. Without `rows` it names texts and positions, as a census does not keep what they say."""
    kinds = kinds_of(found, threshold)
    if rows is None:
        rows = {
            head: [StrongRow(metric, value, text, at) for text, at, value in found.strongest(metric, *head)[:ROWS]]
            for head, metric in telling(found, kinds).items()
        }
    least = {kind: usual if threshold is None else threshold for kind, usual in KINDS.items()}
    return census_page(found.as_json(), rows, title=title, kinds=kinds, least=least, link=link)
