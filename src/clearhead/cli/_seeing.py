"""Running a model on a text, window by window, and keeping what was seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ArgumentError, ClearheadError, UnseenAttentionWarning, explain_problem
from ..inspection._record import record
from ..integrations._hub import shortened
from ..plot._collect import ItemPicture, LayerPicture, SectionPicture, collect
from ..plot._crops import with_crops
from ..plot._given import given
from ..plot._heads import HeadSummary, average, clearest_head, summarize
from ..plot._html import PageMaker
from ..plot._protocol import Recorded
from ._demo import TextModel
from ._errors import UsageProblem, warn
from ._windows import Window

__all__ = ["RECORDED", "STATISTICS", "ChosenHead", "Seen", "record_window", "see"]

#: What the overview can show, and which statistic of a record it is.
STATISTICS = {
    "entropy": "entropy",
    "normalized_entropy": "entropy",
    "confidence": "confidence",
    "sink": "sink",
    "distance": "distance",
    "previous": "offset",
    "max_logit": "max_logit",
    "output_norm": "output_norm",
}
RECORDED = ("entropy", "received", "top_k", "map", "confidence", "sink", "distance", "offset", "max_logit")
FROM_WEIGHTS = frozenset(STATISTICS) - {"max_logit", "output_norm"}
PREVIOUS = "offset -1"


@dataclass(frozen=True)
class ChosenHead:
    """One head on one window.

    Args:
        entropy: of every query, in nats.
        received: by every key, Σ over queries.
        top_keys, top_weights: what every query looks at most; key −1 where there are fewer.
    """

    entropy: list[float]
    received: list[float]
    top_keys: list[list[int]]
    top_weights: list[list[float]]


@dataclass(frozen=True)
class Seen:
    """Where every head looked.

    Args:
        first: the picture of the first window; with the exact weights of the chosen head.
        windows: all of them.
        summaries: per layer and head, over all windows.
        numbers: statistic → layer → head, over all windows.
        chosen: the chosen head, per window.
        place: the chosen layer and head.
        page: the page of all windows, but for its frame.
    """

    first: SectionPicture
    windows: list[Window]
    summaries: list[list[HeadSummary]]
    numbers: dict[str, list[list[float]]]
    chosen: list[ChosenHead]
    place: tuple[int, int]
    page: PageMaker


def see(
    loaded: TextModel,
    windows: Sequence[Window],
    *,
    layer: int | None = None,
    head: int | None = None,
    statistic: str | None = None,
    next_window: Callable[[], None] = lambda: None,
) -> Seen:
    """Run the model on every window and fold what is seen.

    Args:
        loaded: the model.
        windows: from `cut_into_windows`.
        layer, head: the chosen ones. Default: the clearest in the first window.
        statistic: a key of `STATISTICS`.
        next_window: called after each window.

    Raises:
        UsageProblem: for a layer or head that is not there, or a statistic that this model's weights do not give.
        ArgumentError: if the model does not run on text.
    """
    statistics = RECORDED if statistic is None else tuple(dict.fromkeys((*RECORDED, STATISTICS[statistic])))
    if statistic is not None and not loaded.clearhead and statistic not in FROM_WEIGHTS:
        expected = f"one of {', '.join(sorted(FROM_WEIGHTS))} for {loaded.name}, whose attention cannot be replaced"
        raise UsageProblem(explain_problem("--stat", expected=expected, got=statistic))
    page = PageMaker()
    first: SectionPicture | None = None
    place = (0, 0)
    summaries: list[list[list[HeadSummary]]] = []
    numbers: list[dict[str, list[list[float]]]] = []
    heads: list[ChosenHead] = []
    for window in windows:
        rec = record_window(loaded, window, statistics)
        item = replace(collect(rec, [window.tokens])[0], label=f"tokens {window.first}–{window.last}")
        summaries.append(summarize(item.sections[0]))
        if first is None:
            place = choose(summaries[0], layer, head)
        chosen = item.sections[0].layers[place[0]]
        item = with_crops(rec, [item], [(chosen.name, chosen.heads[place[1]])])[0]
        first = first or item.sections[0]
        numbers.append(_numbers(item))
        heads.append(_chosen_head(chosen, place[1]))
        page.add(item)
        next_window()
    if first is None:
        raise ArgumentError(explain_problem("windows", expected="at least one", got="none"))
    lengths = [len(window.tokens) for window in windows]
    return Seen(first, list(windows), average(summaries), _averaged(numbers, lengths), heads, place, page)


def choose(summaries: Sequence[Sequence[HeadSummary]], layer: int | None, head: int | None) -> tuple[int, int]:
    """The head to show large: what was chosen, and for the rest the head with the largest contrast.

    Raises:
        UsageProblem: for a layer or head that is not there.
    """
    if layer is not None and not 0 <= layer < len(summaries):
        raise UsageProblem(explain_problem("--layer", expected=_range(len(summaries)), got=str(layer)))
    layers = list(range(len(summaries))) if layer is None else [layer]
    most = max(len(summaries[index]) for index in layers)
    if head is not None and not 0 <= head < most:
        raise UsageProblem(explain_problem("--head", expected=_range(most), got=str(head)))
    if head is None:
        index, found = clearest_head([summaries[index] for index in layers])
        return layers[index], found
    there = [index for index in layers if head < len(summaries[index])]
    return max(there, key=lambda index: summaries[index][head].contrast), head


def _chosen_head(layer: LayerPicture, head: int) -> ChosenHead:
    fields = (layer.entropy, layer.received, layer.indices, layer.weights)
    return ChosenHead(*(values[head].tolist() for values in fields))


def _range(count: int) -> str:
    return f"0 to {count - 1}, counted from 0"


def record_window(loaded: TextModel, window: Window, statistics: Sequence[str]) -> Recorded:
    """Run the model on a window and record it, queries and keys too; where that is not possible, its own weights."""
    if not loaded.clearhead:
        return given(_own_weights(loaded, window))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnseenAttentionWarning)
        with record(loaded.model, statistics, keep="queries_keys") as rec:
            _run(loaded, window)
    for warning in caught:
        if issubclass(warning.category, UnseenAttentionWarning):
            warn(str(warning.message))
    return rec


def _own_weights(loaded: TextModel, window: Window) -> list[torch.Tensor]:
    outputs = _run(loaded, window, output_attentions=True)
    length = len(window.tokens)
    weights = [layer for layer in getattr(outputs, "attentions", None) or () if layer is not None]
    if not weights or any(tuple(layer.shape[2:]) != (length, length) for layer in weights):
        raise _no_text_model(loaded, "none, or weights of other shapes")
    return weights


def _run(loaded: TextModel, window: Window, **options: Any) -> Any:
    try:
        with torch.no_grad():
            return loaded.model(**window.inputs, **options)
    except ClearheadError:
        raise
    except (AttributeError, TypeError, ValueError) as error:  # a model that needs images, audio, …
        raise _no_text_model(loaded, shortened(f"{type(error).__name__}: {error}", 160)) from error


def _no_text_model(loaded: TextModel, got: str) -> ArgumentError:
    wanted = "a model that runs on text alone and attends from its L tokens to themselves"
    return ArgumentError(explain_problem(f"model {loaded.name}", expected=wanted, got=got))


def _numbers(item: ItemPicture) -> dict[str, list[list[float]]]:
    layers = item.sections[0].layers
    names = [name for name in layers[0].numbers if all(name in layer.numbers for layer in layers)]
    return {
        "previous" if name == PREVIOUS else name: [layer.numbers[name].tolist() for layer in layers] for name in names
    }


def _averaged(numbers: Sequence[dict[str, list[list[float]]]], lengths: Sequence[int]) -> dict[str, list[list[float]]]:
    """Means over windows by their lengths, and the largest of the largest scores."""
    total = sum(lengths)
    result: dict[str, list[list[float]]] = {}
    for name in numbers[0]:
        layers = zip(*(window[name] for window in numbers), strict=True)
        result[name] = [
            [
                max(values)
                if name == "max_logit"
                else sum(value * length for value, length in zip(values, lengths, strict=True)) / total
                for values in zip(*layer, strict=True)
            ]
            for layer in layers
        ]
    return result
