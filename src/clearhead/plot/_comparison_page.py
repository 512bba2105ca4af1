"""The page of a comparison: the first, the second, and their difference, one view each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .._checks import items as items_of
from .._checks import text
from ..errors import RecordError, ShapeError
from ._collect import ItemPicture, collect
from ._compared_records import ComparedRecords
from ._crops import with_crops
from ._difference_picture import difference_picture
from ._html import Page, PageMaker
from ._labels import printable
from ._language import say
from ._sections import find_sections, item_places

MOST_RANKED = 12

#: Module of the first record, number of a head, score.
Ranked = tuple[str, int, float]


@dataclass(frozen=True)
class ComparedItem:
    """One batch item of both records.

    Args:
        views: pictures of the first and the second record. If weights are compared, their difference follows.
        places: ``queries`` and ``keys`` of the difference per section, as places in the first and second text.
    """

    views: list[ItemPicture]
    places: list[dict[str, list[list[int]]]]

    def labelled(self, label: str) -> ComparedItem:
        """The same under a name."""
        return replace(self, views=[replace(view, label=label) for view in self.views])


def comparison_page(comparison: ComparedRecords, labels: Sequence[str], title: str) -> Page:
    """See `Comparison.page`."""
    text("title", title)
    names = [text("labels", label, "two strings") for label in items_of("labels", labels, "two strings")]
    if names == ["first", "second"]:
        names = [say("first"), say("second")]
    if len(names) != 2:
        raise ShapeError("labels", expected="two strings", got=str(len(names)))
    items = compared_items(comparison)
    views = Views(comparison, len(items), [comparison.ranked()[0][:2]])
    for item in items:
        views.add(item)
    return views.page(names, note=comparison.note, ranked=comparison.ranked(), title=title)


def compared_items(comparison: ComparedRecords, large: tuple[str, int] | None = None) -> list[ComparedItem]:
    """Every batch item of a comparison.

    Args:
        comparison: a comparison of two records.
        large: the head that keeps every weight, as a module of the first record and a number. Default: the most
            different head.
    """
    averaged = max(calls[0].averaged for rec in comparison.records for calls in rec.values())
    if averaged > 1:
        expected, got = "records of query heads", f"means over groups of {averaged}"
        fix = "Record without per='kv_head', or use Comparison.plot_heads."
        raise RecordError("compare", expected=expected, got=got, fix=fix)
    sides = [collect(rec, texts) for rec, texts in zip(comparison.records, comparison.texts, strict=True)]
    scores = comparison.scores()
    name, head = large or comparison.ranked()[0][:2]
    for side, rec in enumerate(comparison.records):
        module = (name, comparison.modules[name])[side]
        with contextlib.suppress(RecordError):  # queries and keys were not kept
            sides[side] = with_crops(rec, sides[side], [(module, head)])
    place_of_head = comparison.records[0][name][0].heads.index(head)
    result: list[ComparedItem] = []
    for first, second, place in zip(*sides, item_places(comparison.records[0]), strict=False):
        if comparison.by != "divergence":
            result.append(ComparedItem([first, second], []))
            continue
        views = [_with_scores(view, first, scores) for view in (first, second)]
        views.append(difference_picture(comparison, first, second, place, scores, (name, place_of_head)))
        result.append(ComparedItem(views, _places(comparison, first, place)).labelled(first.label))
    return result


class Views:
    """Makes the page of a comparison, one batch item or window after the other.

    Args:
        comparison: the comparison of the first item.
        count: the number of items.
        chosen: modules of the first record and their heads. These heads keep every number of their rows.
    """

    def __init__(self, comparison: ComparedRecords, count: int, chosen: Sequence[tuple[str, int]]) -> None:
        self._by = comparison.by
        self._together = 3 if self._by == "divergence" else 2
        large = dict.fromkeys((name, head) for module, head in chosen for name in (module, comparison.modules[module]))
        self._maker = PageMaker(count * self._together, list(large), together=self._together)
        self._layers = {
            name: (number, index)
            for number, section in enumerate(find_sections(comparison.records[0], two_texts=False))
            for index, name in enumerate(section.layers)
        }
        self._heads = {name: comparison.records[0][name][0].heads for name in self._layers}
        self._places: list[Any] = []

    def add(self, item: ComparedItem) -> None:
        """Append an item; all have equally many views."""
        for number, view in enumerate(item.views):
            if self._maker.takes_next:
                self._places.append(item.places if number == 2 else None)
            self._maker.add(view)

    def page(
        self,
        labels: Sequence[str],
        *,
        note: str,
        ranked: Sequence[Ranked],
        title: str,
        large: tuple[str, int] | None = None,
    ) -> Page:
        """The finished page.

        Args:
            labels: names of the two records.
            note: the comparison's note.
            ranked: heads, the most different first.
            title: as in `Comparison.page`.
            large: the head that is large at first. Default: the most different.
        """
        places = [
            (*self._layers[name], self._heads[name].index(head), round(value, 4))
            for name, head, value in ranked[:MOST_RANKED]
        ]
        compared = {
            "views": [*printable(labels), say("difference")][: self._together],
            "places": self._places,
            "by": self._by,
            "note": note,
            "ranked": places,
        }
        name, head = large or ranked[0][:2]
        first = (*self._layers[name], self._heads[name].index(head))
        return self._maker.page(first, title=title, compared=compared)


def _with_scores(item: ItemPicture, first: ItemPicture, scores: dict[str, Tensor]) -> ItemPicture:
    """The item with the divergence among the numbers of its heads."""
    sections = [
        replace(
            section,
            layers=[
                replace(layer, numbers={"divergence": scores[name].float()} | layer.numbers)
                for name, layer in zip(named.section.layers, section.layers, strict=True)
            ],
        )
        for named, section in zip(first.sections, item.sections, strict=True)
    ]
    return replace(item, sections=sections)


def _places(comparison: ComparedRecords, item: ItemPicture, place: tuple[int, int]) -> list[dict[str, list[list[int]]]]:
    call, number = place
    alignments = [comparison.pair(part.section.layers[0], call).alignments[number] for part in item.sections]
    return [
        {
            name: [list(pairs.first), list(pairs.second)]
            for name, pairs in (("queries", alignment.queries), ("keys", alignment.keys))
        }
        for alignment in alignments
    ]
