"""``clearhead look --against``: two texts, or two models, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from ..errors import ShapeError, explain_problem
from ..plot._alignment import align
from ..plot._collect import SectionPicture
from ..plot._compared_records import ranked_heads
from ..plot._comparison import Comparison
from ..plot._comparison_page import Views, compared_items
from ..plot._comparison_plots import draw_comparison, name_of
from ..plot._heads import summarize
from ..plot._html import Page
from ..plot._labels import layer_labels, printable, shortened
from ..plot._language import say
from ..plot._terminal import grid_size, top_changes
from . import _demo as demo
from ._choice import RECORDED, Choice
from ._demo import PretrainedModel
from ._errors import UsageProblem, warn
from ._output import Look
from ._progress import Work
from ._running import about_the_model, as_table, run_recorded
from ._windows import Window, cut_into_windows, joined_inputs, unknown_note

LONGEST_NAME = 60
MOST_RANKED = 5

#: A window of the first text and one of the second.
Pair = tuple[Window, Window]


def require_against(against: str | None, against_model: str | None, others: Mapping[str, str | None]) -> None:
    """Raise `UsageProblem` for options that mean nothing in a comparison."""
    if against is not None and not against.strip():
        raise UsageProblem(explain_problem("--against", expected="some text", got="nothing but white space"))
    for option, value in others.items():
        if value is not None:
            beside = "--against" if against_model is None else "--against-model"
            raise UsageProblem(explain_problem(option, expected=f"no {option} beside {beside}", got=value))


def look_at_both(texts: tuple[str, str], models: tuple[str | None, str | None], choice: Choice, work: Work) -> Look:
    """Load what is needed, run both and compare them."""
    first = demo.load_text_model(models[0], notify=warn)
    second = first if models[1] == models[0] else demo.load_text_model(models[1], notify=warn)
    work.loaded()
    windows = (cut_into_windows(first, texts[0]), cut_into_windows(second, texts[1]))
    titles = [" ".join(text.split()) for text in texts]
    if titles[0] == titles[1]:
        titles = [first.name, second.name if second.name != first.name else models[1] or second.name]
    pairs, left_out = _pairs(windows)
    advance = work.step(
        say("running both") if len(pairs) == 1 else say("running both on {0} windows", len(pairs)), len(pairs)
    )
    both = Both((first, second), pairs, choice, advance)
    labels = (shortened(titles[0], LONGEST_NAME), shortened(titles[1], LONGEST_NAME))
    note = f"{both.comparison.note} {left_out}".rstrip()
    by, scores = both.comparison.by, as_table(list(both.scores.values()))
    measure = say("{0} in nats", name_of(by)) if by == "divergence" else name_of(by)
    return Look(
        model=first.name,
        modules=both.modules,
        place=both.place,
        summaries=summarize(both.pictures[0]),
        numbers=(measure, scores),
        columns={"difference": scores, **both.statistics()},
        fields={"compared": note, "by": by, "labels": labels},
        facts=_facts(first.name, both, labels, note),
        findings=[_finding(both, measure)],
        details=lambda _: _changes(both),
        warnings=[note for note in dict.fromkeys(map(unknown_note, (first, second), windows)) if note is not None],
        figure=lambda: draw_comparison(both.pictures, both.place, scores, labels=labels, by=by, note=note),
        page=lambda: both.page(labels, note, first.name),
    )


class Both:
    """Two runs compared, folded one pair of windows after the other.

    The large head is the chosen one, or differs most in the first pair. `next_pair` is called after each pair.

    Attributes:
        comparison: the comparison of the first pair.
        scores: module → (H,), the differences of its heads over all windows.
        pictures: both pictures of the first pair, and their difference if weights are compared.
    """

    def __init__(
        self,
        models: tuple[PretrainedModel, PretrainedModel],
        pairs: Sequence[Pair],
        choice: Choice,
        next_pair: Callable[[], None],
    ) -> None:
        self.count = len(pairs)
        self.comparison = _compare(models, pairs[0])
        self.modules = list(self.comparison.modules)
        places = choice.places([len(heads) for heads in self.comparison.heads.values()])
        self._large = next(
            (name, head) for name, head, _ in self.comparison.ranked() if (self.modules.index(name), head) in places
        )
        self.place = (self.modules.index(self._large[0]), self._large[1])
        self._views = Views(self.comparison, len(pairs), [self._large])
        self.pictures: list[SectionPicture] = []
        totals = {name: torch.zeros(len(heads), dtype=torch.float64) for name, heads in self.comparison.heads.items()}
        for pair in pairs:
            comparison = _compare(models, pair) if self.pictures else self.comparison
            with about_the_model(models[0]):
                [item] = compared_items(comparison, self._large)
            self.pictures = self.pictures or [view.sections[0] for view in item.views]
            self._views.add(item.labelled(say("tokens {0}–{1}", pair[0].first, pair[0].last)))
            for total, scores in zip(totals.values(), comparison.scores().values(), strict=True):
                total += scores.double() * len(pair[0].tokens)
            next_pair()
        tokens = sum(len(first.tokens) for first, _ in pairs)
        self.scores: dict[str, Tensor] = {name: total / tokens for name, total in totals.items()}

    def ranked(self) -> list[tuple[str, int, float]]:
        """Module, head and score, the most different first."""
        return ranked_heads(self.scores, self.comparison.heads)

    def statistics(self) -> dict[str, list[Tensor]]:
        """Statistic → layer → (H, 2), of both runs of the first pair."""
        first, second = (rec.summary() for rec in self.comparison.records)
        return {
            name: [
                torch.stack([first[name][one].cpu(), second[name][two].cpu()], -1)
                for one, two in self.comparison.modules.items()
            ]
            for name in self.comparison.differences
        }

    def page(self, labels: tuple[str, str], note: str, title: str) -> Page:
        """The page of all windows."""
        return self._views.page(labels, note=note, ranked=self.ranked(), title=title, large=self._large)


def _pairs(windows: tuple[Sequence[Window], Sequence[Window]]) -> tuple[list[Pair], str]:
    """The pairs of windows whose tokens agree, or all pairs, and a sentence about the others."""
    both = list(zip(*windows, strict=False))
    agreeing = [pair for pair in both if align(pair[0].tokens, pair[1].tokens).enough]
    most = max(len(side) for side in windows)
    if not agreeing or len(agreeing) == most:
        return both, ""
    return agreeing, say("Of {0} windows, {1} have no counterpart and are left out.", most, most - len(agreeing))


def _compare(models: tuple[PretrainedModel, PretrainedModel], pair: Pair) -> Comparison:
    first, second = (
        run_recorded(model, joined_inputs([window]), RECORDED, set())
        for model, window in zip(models, pair, strict=True)
    )
    with about_the_model(models[0]):
        try:
            return Comparison(first, second, [pair[0].tokens], [pair[1].tokens])
        except ShapeError as error:
            got = str(error).partition(": ")[2].partition(". ")[0].rstrip(".")
            raise ShapeError(f"--against-model {models[1].name}: {got}.") from error


def _facts(name: str, both: Both, labels: tuple[str, str], note: str) -> RenderableType:
    heads = max(len(row) for row in both.scores.values())
    windows = "" if both.count == 1 else " · " + say("{0} windows", both.count)
    size = grid_size(len(both.modules), heads)
    return Group(
        Text(f"{printable([name])[0]} · {size}{windows}", style="bold"),
        *map(Text, map("{:<6}  {}".format, (say("first"), say("second")), printable(labels))),
        Text(note, style="dim"),
    )


def _finding(both: Both, measure: str) -> RenderableType:
    """The heads that differ most."""
    labels = dict(zip(both.modules, layer_labels(both.modules), strict=True))
    ranking = ", ".join(
        say("layer {0} head {1} ({2})", labels[name], head, f"{value:.3f}")
        for name, head, value in both.ranked()[:MOST_RANKED]
    )
    return Text(say("heads that differ most, by {0}: {1}", measure, ranking))


def _changes(both: Both) -> list[RenderableType]:
    """Where the large head changes."""
    if len(both.pictures) < 3:
        return []
    layer, head = both.place
    label = layer_labels(both.modules)[layer]
    title = say("layer {0}, head {1}: where each token's look changes most", label, head)
    return [Group(Text(title, style="bold"), top_changes(both.pictures[2], layer, head))]
