"""``clearhead look`` on a text: a pretrained model, window by window."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import Tensor

from .._statistics.definitions import BY_MAXIMUM, OF_WEIGHTS
from .._statistics.recorded import Recorded
from ..errors import ArgumentError, explain_problem
from ..plot._collect import ItemPicture, collect
from ..plot._crops import with_crops_of
from ..plot._heads import HeadSummary, average, summarize
from ..plot._html import PageMaker
from ..plot._labels import printable
from ..plot._language import say
from ..plot._page_contents import first_query
from ..plot._sheet import draw_sheet
from ..plot._terminal import grid_size, heads_by_kind, marginals, top_keys
from . import _demo as demo
from ._choice import SHOWN, Choice, numbers_of
from ._demo import PretrainedModel
from ._errors import UsageProblem, warn
from ._output import Look
from ._progress import Work
from ._running import about_the_model, after_each, blocks_of, one_thread, run_recorded
from ._windows import Window, cut_into_windows, joined_inputs, unknown_note

TITLE = 400  # characters of the text, of which the picture shows fewer
#: Tokens of windows that run together; beyond, a batch saves nothing more and takes memory.
TOKENS_AT_ONCE = 2048


def look_at_text(text: str, model: str | None, link: str | None, choice: Choice, work: Work) -> Look:
    """Load a model, run it on a text and read off where its heads look. `link` is the address of a census."""
    loaded = demo.load_text_model(model, notify=warn)
    work.loaded()
    work.step(say("reading the text"))
    windows = cut_into_windows(loaded, text)
    note = unknown_note(loaded, windows)
    running = say("running it") if len(windows) == 1 else say("running it on {0} windows", len(windows))
    seen = see(loaded, windows, choice, work.step(running, parts_of(loaded, windows)))
    title, numbers = " ".join(text[:TITLE].split()), choice.numbers(seen.numbers)
    notes = [] if note is None else [note]
    return Look(
        model=loaded.name,
        modules=[layer.name for layer in seen.first.layers],
        place=seen.place,
        summaries=seen.summaries,
        numbers=numbers,
        columns={"looks_at": [[head.kind for head in row] for row in seen.summaries], **seen.numbers},
        fields={"windows": seen.chosen},
        facts=Text(_facts(loaded, seen), style="bold"),
        findings=[_finding(seen, choice), heads_by_kind(seen.summaries)],
        details=partial(_details, seen),
        warnings=notes,
        figure=lambda: draw_sheet(seen.first, *seen.place, title=title, numbers=numbers),
        page=lambda: seen.page.page(
            (0, *seen.place), title=loaded.name, statistic=choice.on_page, notes=notes, link=link
        ),
    )


class Seen:
    """Where every head looked, folded one window after the other.

    Attributes:
        first: the picture of the first window, with the exact weights of the chosen head.
        numbers: statistic → layer → (H,), over all windows.
        chosen: the JSON of the chosen head, per window.
        page: the maker of the page.
    """

    def __init__(self, windows: Sequence[Window], item: ItemPicture, place: tuple[int, int]) -> None:
        self.windows, self.place = windows, place
        self.first = item.sections[0]
        layer = self.first.layers[place[0]]
        self._large = (layer.name, layer.heads[place[1]])
        self.page = PageMaker(len(windows), [self._large])
        self._summaries: list[list[list[HeadSummary]]] = []
        self.numbers: dict[str, list[Tensor]] = {}
        self.chosen: list[dict[str, Any]] = []
        self._length = 0

    def add(self, rec: Recorded, items: Sequence[ItemPicture], batch: Sequence[Window]) -> None:
        """Fold a batch of windows."""
        for number, (item, window) in enumerate(zip(items, batch, strict=True)):
            item = replace(item, label=say("tokens {0}–{1}", window.first, window.last))
            if self.page.takes_next:
                item = with_crops_of(rec, item, number, [self._large])
            section, summaries = item.sections[0], [summarize(picture) for picture in item.sections]
            if not self.chosen:
                self.first = section
            self.page.add(item, summaries)
            layer, head = section.layers[self.place[0]], self.place[1]
            self.chosen.append(
                {
                    "first": window.first,
                    "last": window.last,
                    "tokens": list(window.tokens.names),
                    "special": list(window.tokens.special),
                    "entropy": layer.entropy[head].clone(),  # without the other heads
                    "received": layer.received[head].clone(),
                    "top_keys": layer.indices[head].int(),
                    "top_weights": layer.weights[head].clone(),
                }
            )
            self._summaries.append(summaries[0])
            self._average(numbers_of(section), len(window.tokens))

    @cached_property
    def summaries(self) -> list[list[HeadSummary]]:
        """Layer → head, over all windows."""
        return average(self._summaries)

    def _average(self, numbers: dict[str, list[Tensor]], length: int) -> None:
        """Means over windows by their lengths, and the largest of the largest scores."""
        self._length += length
        for name, layers in numbers.items():
            pairs = zip(self.numbers.get(name, layers), layers, strict=True)
            merge = torch.maximum if name in BY_MAXIMUM else partial(torch.lerp, weight=length / self._length)
            self.numbers[name] = [merge(known, new) for known, new in pairs]


def see(
    loaded: PretrainedModel, windows: Sequence[Window], choice: Choice, next_part: Callable[[], None] = lambda: None
) -> Seen:
    """Run the model on every window and fold the records.

    The large head is the chosen one, or the clearest in the first window. `next_part` is called `parts_of` times, after
    equal parts of the work. Choices that this model does not have raise `UsageProblem`.
    """
    if choice.statistic is not None and not loaded.recordable and SHOWN[choice.statistic] not in OF_WEIGHTS:
        known = sorted(label for label, name in SHOWN.items() if name in OF_WEIGHTS)
        expected = f"one of {', '.join(known)} for {loaded.name}, whose attention cannot be replaced"
        raise UsageProblem(explain_problem("--stat", expected=expected, got=choice.statistic))
    seen: Seen | None = None
    warned: set[str] = set()
    blocks = blocks_of(loaded)
    for batch in _batches(loaded, windows):
        with after_each(blocks, next_part):
            rec = run_recorded(loaded, joined_inputs(batch), choice.recorded, warned)
        with one_thread():
            with about_the_model(loaded):
                items = collect(rec, [window.tokens for window in batch])
            if seen is None:
                seen = Seen(windows, items[0], choice.clearest(summarize(items[0].sections[0])))
            seen.add(rec, items, batch)
        del rec, items  # before the next ones take as much memory
        next_part()
    if seen is None:
        raise ArgumentError("windows", expected="at least one", got="none")
    return seen


def parts_of(loaded: PretrainedModel, windows: Sequence[Window]) -> int:
    """How many equal parts the work of `see` has."""
    return (len(blocks_of(loaded)) + 1) * sum(1 for _ in _batches(loaded, windows))


def _batches(loaded: PretrainedModel, windows: Sequence[Window]) -> Generator[list[Window]]:
    """Neighbouring windows of one length that run together, without any padding."""
    batch: list[Window] = []
    for window in windows:
        length = len(window.tokens)
        fits = loaded.recordable and (len(batch) + 1) * length <= TOKENS_AT_ONCE
        if batch and not (fits and len(batch[0].tokens) == length):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _facts(loaded: PretrainedModel, seen: Seen) -> str:
    heads = max(len(row) for row in seen.summaries)
    tokens = len(seen.windows[0].tokens)
    facts = f"{printable([loaded.name])[0]} · {grid_size(len(seen.summaries), heads)}"
    if len(seen.windows) == 1:
        return f"{facts} · {say('{0} tokens', tokens)}"
    every = seen.windows[-1].last + 1
    return f"{facts} · {say('{0} tokens in {1} windows of up to {2}', every, len(seen.windows), tokens)}"


def _finding(seen: Seen, choice: Choice) -> RenderableType:
    """The large head and what one of its words looks at most, and why this head."""
    (layer, head), picture = seen.place, seen.first
    query = first_query(picture, layer, head)
    line = Text(say("layer {0}, head {1}", layer, head) + say(": "))
    key, weight = (of[head, query, 0] for of in (picture.layers[layer].indices, picture.layers[layer].weights))
    if key >= 0:
        names = printable([picture.queries.names[query], picture.keys.names[int(key)]])
        line.append(names[0], "bold").append(" → ").append(names[1], "bold").append(f" {weight:.2f}")
    lines = [line]
    if choice.layer is None or choice.head is None:
        distant = say("Shown because it clearly links distant words; choose with --layer and --head.")
        varied = say("Shown because different words clearly look at different words; choose with --layer and --head.")
        lines.append(Text(distant if abs(key - query) > 1 else varied, "dim"))
    if len(seen.windows) > 1:
        first, last = seen.windows[0].first, seen.windows[0].last
        which = say("This is the first window of {0}, tokens {1}–{2}.", len(seen.windows), first, last)
        lines.append(Text(f"{which} {say('What heads do is the mean over all windows.')}", "dim"))
    return Group(*lines)


def _details(seen: Seen, console: Console) -> list[RenderableType]:
    """The large head token by token, and the text shaded by what its tokens receive."""
    layer, head = seen.place
    title = Text(say("layer {0}, head {1}: what each token looks at most", layer, head), style="bold")
    return [Group(title, top_keys(seen.first, *seen.place)), marginals(seen.first, *seen.place, console)]
