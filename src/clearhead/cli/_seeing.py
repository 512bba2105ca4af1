"""Running a model on a text, window by window, and keeping what was seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .._statistics.definitions import LARGEST, OF_WEIGHTS, STATISTICS
from .._statistics.recorded import Recorded
from .._statistics.statistic import Options
from ..errors import ArgumentError, ClearheadError, UnseenAttentionWarning, explain_problem
from ..inspection._record import record
from ..integrations._hub import shortened
from ..plot._collect import ItemPicture, LayerPicture, SectionPicture, collect
from ..plot._crops import with_crops_of
from ..plot._given import given
from ..plot._heads import HeadSummary, average, clearest_head, summarize
from ..plot._html import PageMaker
from ._demo import TextModel
from ._errors import UsageProblem, warn
from ._windows import Window

PREVIOUS = "offset -1"
#: What the overview can show, and which statistic of a record it is.
SHOWN = {
    "previous" if label == PREVIOUS else label: name
    for name, kind in STATISTICS.items()
    for label in kind.labels(Options())
}
RECORDED = (*OF_WEIGHTS, "max_logit")


def shown_statistic(name: str | None) -> str:
    """What a page calls a key of `SHOWN`; the maps, where none is chosen."""
    return {None: "maps", "previous": PREVIOUS}.get(name, name) or "maps"


def recorded_with(name: str | None) -> tuple[str, ...]:
    """The statistics to record, with that of a key of `SHOWN` if one is chosen.

    Raises:
        UsageProblem: for another name.
    """
    if name is None:
        return RECORDED
    if name not in SHOWN:
        raise UsageProblem(explain_problem("--stat", expected=f"one of {', '.join(SHOWN)}", got=name))
    return tuple(dict.fromkeys((*RECORDED, SHOWN[name])))


#: Tokens of windows that run together; beyond, a batch saves nothing more and takes memory.
TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class ChosenHead:
    """One head on one window.

    Args:
        entropy: (L,) of every query, in nats.
        received: (S,) by every key, Σ over queries.
        top_keys, top_weights: (L, k), what every query looks at most; key −1 where there are fewer.
    """

    entropy: torch.Tensor
    received: torch.Tensor
    top_keys: torch.Tensor
    top_weights: torch.Tensor


class Seen:
    """Where every head looked, folded one window after the other.

    Args:
        windows: all of them.
        item: the picture of the first.
        place: the chosen layer and head.

    Attributes:
        first: the section of the first window that is shown, with the exact weights of the chosen head.
        summaries: per layer and head, over all windows.
        numbers: statistic → layer → (H,), over all windows.
        chosen: the chosen head, per window.
        page: the page of all windows, but for its frame.
    """

    def __init__(self, windows: Sequence[Window], item: ItemPicture, place: tuple[int, int]) -> None:
        self.windows, self.place = windows, place
        self.first = item.sections[0]
        layer = self.first.layers[place[0]]
        self._large = (layer.name, layer.heads[place[1]])
        self.page = PageMaker(len(windows), [self._large])
        self.summaries: list[list[HeadSummary]] = []
        self.numbers: dict[str, list[torch.Tensor]] = {}
        self.chosen: list[ChosenHead] = []
        self._length = 0

    def add(self, rec: Recorded, items: Sequence[ItemPicture], batch: Sequence[Window]) -> None:
        """Take what is to be kept of a batch of windows."""
        for number, (item, window) in enumerate(zip(items, batch, strict=True)):
            item = replace(item, label=f"tokens {window.first}–{window.last}")
            if self.page.takes_next:
                item = with_crops_of(rec, item, number, [self._large])
            section, found = item.sections[0], [summarize(picture) for picture in item.sections]
            if not self.chosen:
                self.first = section
            self.page.add(item, found)
            self.chosen.append(_chosen_head(section.layers[self.place[0]], self.place[1]))
            self.summaries = average([self.summaries, found[0]]) if self.summaries else found[0]
            self._average(numbers_of(section), len(window.tokens))

    def _average(self, numbers: dict[str, list[torch.Tensor]], length: int) -> None:
        """Means over windows by their lengths, and the largest of the largest scores."""
        self._length += length
        for name, layers in numbers.items():
            pairs = zip(self.numbers.get(name, layers), layers, strict=True)
            merge = torch.maximum if name in LARGEST else partial(torch.lerp, weight=length / self._length)
            self.numbers[name] = [merge(known, new) for known, new in pairs]


def see(
    loaded: TextModel,
    windows: Sequence[Window],
    *,
    layer: int | None = None,
    head: int | None = None,
    statistic: str | None = None,
    next_part: Callable[[], None] = lambda: None,
) -> Seen:
    """Run the model on every window and fold what is seen.

    Args:
        loaded: the model.
        windows: from `cut_into_windows`.
        layer, head: the chosen ones. Default: the clearest in the first window.
        statistic: a key of `SHOWN`.
        next_part: called as often as `parts_of` says, after equal parts of the work.

    Raises:
        UsageProblem: for a layer or head that is not there, or a statistic that this model's weights do not give.
        ArgumentError: if the model does not run on text.
    """
    statistics = recorded_with(statistic)
    if statistic is not None and not loaded.clearhead and SHOWN[statistic] not in OF_WEIGHTS:
        known = sorted(label for label, name in SHOWN.items() if name in OF_WEIGHTS)
        expected = f"one of {', '.join(known)} for {loaded.name}, whose attention cannot be replaced"
        raise UsageProblem(explain_problem("--stat", expected=expected, got=statistic))
    seen: Seen | None = None
    warned: set[str] = set()
    blocks = blocks_of(loaded)
    for batch in _batches(loaded, windows):
        with _after_each(blocks, next_part):
            rec = record_windows(loaded, batch, statistics, warned)
        items = collect(rec, [window.tokens for window in batch])
        if seen is None:
            seen = Seen(windows, items[0], choose(summarize(items[0].sections[0]), layer, head))
        seen.add(rec, items, batch)
        next_part()
    if seen is None:
        raise ArgumentError("windows", expected="at least one", got="none")
    return seen


def parts_of(loaded: TextModel, windows: Sequence[Window]) -> int:
    """How many equal parts the work of `see` has."""
    return (len(blocks_of(loaded)) + 1) * sum(1 for _ in _batches(loaded, windows))


def blocks_of(loaded: TextModel) -> list[torch.nn.Module]:
    """The longest row of modules of a model: its layers, each of which takes about the same time."""
    rows = [list(module) for module in loaded.model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(rows, key=len, default=[])


@contextmanager
def _after_each(blocks: Sequence[torch.nn.Module], advance: Callable[[], None]) -> Generator[None]:
    """Call `advance` after each module has run; what has not run by the end counts too."""
    left = len(blocks)

    def ran(*_: object) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            advance()

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(block.register_forward_hook(ran).remove)
        yield
    while left > 0:
        ran()


def _batches(loaded: TextModel, windows: Sequence[Window]) -> Generator[list[Window]]:
    """Neighbouring windows of one length that run together, without any padding."""
    batch: list[Window] = []
    for window in windows:
        length = len(window.tokens)
        fits = loaded.clearhead and (len(batch) + 1) * length <= TOKENS_AT_ONCE
        if batch and not (fits and len(batch[0].tokens) == length):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def choose(summaries: Sequence[Sequence[HeadSummary]], layer: int | None, head: int | None) -> tuple[int, int]:
    """The head to show large: what was chosen, and for the rest the head with the largest contrast.

    Raises:
        UsageProblem: for a layer or head that is not there.
    """
    return clearest_head(summaries, places_of([len(row) for row in summaries], layer, head))


def places_of(heads: Sequence[int], layer: int | None, head: int | None) -> list[tuple[int, int]]:
    """The places that a choice of a layer, a head, both or neither leaves, where layers have so many heads.

    Raises:
        UsageProblem: for a layer or head that is not there.
    """
    if layer is not None and not 0 <= layer < len(heads):
        raise UsageProblem(explain_problem("--layer", expected=_range(len(heads)), got=str(layer)))
    layers = range(len(heads)) if layer is None else [layer]
    most = max(heads[index] for index in layers)
    if head is not None and not 0 <= head < most:
        raise UsageProblem(explain_problem("--head", expected=_range(most), got=str(head)))
    return [(index, place) for index in layers for place in range(heads[index]) if head in (None, place)]


def _chosen_head(layer: LayerPicture, head: int) -> ChosenHead:
    fields = (layer.entropy, layer.received, layer.indices.int(), layer.weights)
    return ChosenHead(*(values[head].clone() for values in fields))  # without the other heads


def _range(count: int) -> str:
    return f"0 to {count - 1}, counted from 0"


def record_windows(loaded: TextModel, batch: Sequence[Window], statistics: Sequence[str], warned: set[str]) -> Recorded:
    """Run the model on windows of one length and record it; where that is not possible, its own weights."""
    if not loaded.clearhead:
        return given(_own_weights(loaded, batch))
    with unseen_on_stderr(warned), record(loaded.model, statistics, keep="queries_keys") as rec:
        _run(loaded, batch)
    return rec


@contextmanager
def unseen_on_stderr(warned: set[str]) -> Generator[None]:
    """Write warnings about attention that was not recorded as lines, but for those in `warned`, where they are put."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnseenAttentionWarning)
        yield
    for warning in caught:
        text = str(warning.message)
        if issubclass(warning.category, UnseenAttentionWarning) and text not in warned:
            warned.add(text)
            warn(text)


def _own_weights(loaded: TextModel, batch: Sequence[Window]) -> list[torch.Tensor]:
    outputs = _run(loaded, batch, output_attentions=True)
    length = len(batch[0].tokens)
    weights = [layer for layer in getattr(outputs, "attentions", None) or () if layer is not None]
    if not weights or any(tuple(layer.shape[2:]) != (length, length) for layer in weights):
        raise _no_text_model(loaded, "none, or weights of other shapes")
    return weights


def _run(loaded: TextModel, batch: Sequence[Window], **options: Any) -> Any:
    inputs = {name: torch.cat([window.inputs[name] for window in batch]) for name in batch[0].inputs}
    try:
        with torch.no_grad():
            return loaded.model(**inputs, **options)
    except ClearheadError:
        raise
    except (AttributeError, TypeError, ValueError) as error:  # a model that needs images, audio, …
        raise _no_text_model(loaded, shortened(f"{type(error).__name__}: {error}", 160)) from error


def _no_text_model(loaded: TextModel, got: str) -> ArgumentError:
    wanted = "a model that runs on text alone and attends from its L tokens to themselves"
    return ArgumentError(f"model {loaded.name}", expected=wanted, got=got)


def shown_numbers(
    statistic: str | None, numbers: Mapping[str, Sequence[torch.Tensor]]
) -> tuple[str, list[list[float]]] | None:
    """A statistic's name and one number per layer and head, as pictures of all heads take them; ``None`` of none."""
    return None if statistic is None else (statistic, [layer.tolist() for layer in numbers[statistic]])


def numbers_of(picture: SectionPicture) -> dict[str, list[torch.Tensor]]:
    """Statistic, as `SHOWN` calls it → layer → (H,), of those that all layers have."""
    layers = picture.layers
    names = [name for name in layers[0].numbers if all(name in layer.numbers for layer in layers)]
    return {
        "previous" if name == PREVIOUS else name: [layer.numbers[name].double() for layer in layers] for name in names
    }
