"""Running two texts, or two models, and comparing their heads window by window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import ArgumentError, ShapeError
from ..plot._alignment import align
from ..plot._collect import SectionPicture
from ..plot._comparison import Comparison
from ..plot._comparison_page import Views, compared_items
from ..plot._html import Page
from ._demo import TextModel
from ._seeing import RECORDED, places_of, record_windows
from ._windows import Window

SHARED_WORDS = 12  # characters


@dataclass(frozen=True)
class Against:
    """Two runs side by side.

    Args:
        labels: what the two are called.
        comparison: of the first window.
        note: what was compared, in a sentence.
        scores: layer → head, how different they are, over all windows.
        pictures: of the first window: the first, the second and, where weights are compared, their difference.
        place: the head that is shown large.
        windows: how many pairs of windows were compared.
        views: the page of all windows, but for its frame.
    """

    labels: tuple[str, str]
    comparison: Comparison
    note: str
    scores: list[list[float]]
    pictures: list[SectionPicture]
    place: tuple[int, int]
    windows: int
    views: Views

    @property
    def modules(self) -> list[str]:
        """Names of the first model's layers."""
        return list(self.comparison.modules)

    def ranked(self) -> list[tuple[int, int, float]]:
        """Layer, head and score, the most different first."""
        found = [(layer, head, value) for layer, row in enumerate(self.scores) for head, value in enumerate(row)]
        return sorted(found, key=lambda each: -each[2])

    def page(self, *, title: str) -> Page:
        """The page of all windows."""
        names = self.modules
        ranked = [(names[layer], head, value) for layer, head, value in self.ranked()]
        large = (names[self.place[0]], self.place[1])
        labels = where_they_part(*self.labels)
        return self.views.page(labels, note=self.note, ranked=ranked, title=title, large=large)


def see_both(
    models: tuple[TextModel, TextModel],
    windows: tuple[Sequence[Window], Sequence[Window]],
    labels: tuple[str, str],
    *,
    layer: int | None = None,
    head: int | None = None,
    next_window: Callable[[], None] = lambda: None,
) -> Against:
    """Run both models on the windows of both texts, pair by pair, and compare them.

    Args:
        models: what runs the first and the second text.
        windows: of both, from `cut_into_windows`; those that the longer text has more are left out.
        labels: what to call the two.
        layer, head: the head shown large. Default: the one that differs most in the first window.
        next_window: called after each pair.

    Raises:
        UsageProblem: for a layer or head that is not there.
        ShapeError: if the models differ in layers or heads.
    """
    pairs, left = _pairs(windows)
    if not pairs:
        raise ArgumentError("windows", expected="at least one pair", got="none")
    comparison = _compare(models, pairs[0])
    large = _large(comparison, layer, head)
    views = Views(comparison, len(pairs), [large])
    scores: list[torch.Tensor] = []
    pictures: list[SectionPicture] = []
    for first, second in pairs:
        found = _compare(models, (first, second)) if scores else comparison
        [item] = compared_items(found, large)
        pictures = pictures or [view.sections[0] for view in item.views]
        views.add(item.labelled(f"tokens {first.first}–{first.last}"))
        rows = [row.double() for row in found.scores().values()]
        scores.append(pad_sequence(rows, batch_first=True) * len(first.tokens))
        next_window()
    mean = torch.stack(scores).sum(0) / sum(len(first.tokens) for first, _ in pairs)
    modules = list(comparison.modules)
    counts = [len(comparison.records[0][name][0].heads) for name in modules]
    return Against(
        labels=labels,
        comparison=comparison,
        note=f"{comparison.note} {left}".rstrip(),
        scores=[row[:count].tolist() for row, count in zip(mean, counts, strict=True)],
        pictures=pictures,
        place=(modules.index(large[0]), large[1]),
        windows=len(pairs),
        views=views,
    )


def where_they_part(first: str, second: str) -> tuple[str, str]:
    """Both without the words at the beginning that they share, which leave no room for others on a small button."""
    alike = next((place for place, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), 0)
    shared = first.rfind(" ", 0, alike) + 1
    return (first, second) if shared < SHARED_WORDS else (f"…{first[shared:]}", f"…{second[shared:]}")


def _pairs(windows: tuple[Sequence[Window], Sequence[Window]]) -> tuple[list[tuple[Window, Window]], str]:
    """The pairs of windows to compare, those whose tokens agree if there are any, and a sentence about the others."""
    both = list(zip(*windows, strict=False))
    agreeing = [pair for pair in both if align(pair[0].tokens, pair[1].tokens).enough]
    most = max(len(side) for side in windows)
    if not agreeing or len(agreeing) == most:
        return both, ""
    return agreeing, f"Of {most} windows, {most - len(agreeing)} have no counterpart and are left out."


def _compare(models: tuple[TextModel, TextModel], pair: tuple[Window, Window]) -> Comparison:
    first, second = (
        record_windows(model, [window], RECORDED, set()) for model, window in zip(models, pair, strict=True)
    )
    try:
        return Comparison(first, second, [pair[0].tokens], [pair[1].tokens])
    except ShapeError as error:
        got = str(error).partition(": ")[2]
        raise ShapeError(f"--against-model {models[1].name}: {got}") from error


def _large(comparison: Comparison, layer: int | None, head: int | None) -> tuple[str, int]:
    """The module and head that differ most, of those that were chosen."""
    names = list(comparison.modules)
    places = places_of([len(row) for row in comparison.scores().values()], layer, head)
    return next((name, number) for name, number, _ in comparison.ranked() if (names.index(name), number) in places)
