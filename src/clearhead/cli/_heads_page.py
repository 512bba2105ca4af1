"""The page of ``clearhead heads``: its corpus once more, for the texts in which heads were strongest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import explain_problem
from ..inspection._census._page import ROWS, Head, kinds_of, least_of, telling
from ..inspection._census._result import Census
from ..plot._census_page import Kinds, StrongRow, WholeMap, census_page
from ..plot._html import Page
from ..plot._language import say
from ..plot._tokens import Tokens
from ._demo import PretrainedModel
from ._errors import UsageProblem
from ._running import run_recorded

TOKENS_AT_ONCE = 4096
KEYS = 16  # of a row
LEAST_WEIGHT = 0.005  # of a key that is listed
AROUND, BEYOND = 10, 4  # tokens of a context beside the query, and beside its largest key
MAPS, MAP = 24, 48  # named heads with a whole map, and its tokens


@dataclass(frozen=True)
class Corpus:
    """The texts of a census: their batches, and each text again as its model reads it."""

    texts: Sequence[dict[str, Tensor]]
    tokens: Sequence[Tokens]

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Texts in order, padded to the longest of a batch."""
        batch: list[dict[str, Tensor]] = []
        for text in self.texts:
            longest = max(each["input_ids"].shape[1] for each in (*batch, text))
            if batch and longest * (len(batch) + 1) > TOKENS_AT_ONCE:
                yield _padded(batch)
                batch = []
            batch.append(text)
        if batch:
            yield _padded(batch)


@dataclass(frozen=True)
class Shown:
    """The options of the page: the mean that names a head, the heads with whole maps, the address of another page."""

    threshold: float | None = None
    chosen: Sequence[Head] = ()
    link: str | None = None


class _Wanted(NamedTuple):
    """A row to read when its text runs again."""

    head: Head
    metric: str
    position: int
    value: float
    has_map: bool


def page_of(loaded: PretrainedModel, found: Census, corpus: Corpus, shown: Shown) -> Page:
    """The page, with the strongest rows of every head; whole maps are of the chosen heads, or of those with a name."""
    require_heads(shown.chosen, [moments.count.shape[1] for moments in found.layers.values()])
    index = found.as_json()
    kinds = kinds_of(index, found.kinds(shown.threshold))
    mapped = shown.chosen or list(dict.fromkeys(_by_rank(kinds)))[:MAPS]
    rows = _rows(loaded, corpus, _wanted(found, telling(index, kinds), set(mapped)))
    title = say("What the heads of {0} do", loaded.name)
    return census_page(index, rows, title=title, kinds=kinds, least=least_of(shown.threshold), link=shown.link)


def require_heads(chosen: Sequence[Head], heads: Sequence[int]) -> None:
    """Raise `UsageProblem` for a chosen head that a model with these `heads` in its layers does not have."""
    for layer, head in chosen:
        if layer >= len(heads) or head >= heads[layer]:
            expected = f"one of {sum(heads)} heads in {len(heads)} layers, both from 0"
            raise UsageProblem(explain_problem("--map", expected=expected, got=f"{layer}.{head}"))


def _by_rank(kinds: Kinds) -> Iterator[Head]:
    """The first head of every kind, then the second, and so on."""
    for rank in range(max(map(len, kinds.values()), default=0)):
        yield from (ranked[rank][:2] for ranked in kinds.values() if rank < len(ranked))


def _wanted(found: Census, told: Mapping[Head, str], mapped: set[Head]) -> dict[int, list[_Wanted]]:
    """Text → the rows that the page shows of it."""
    wanted: dict[int, list[_Wanted]] = {}
    for head, metric in told.items():
        for rank, (text, position, value) in enumerate(found.strongest(metric, *head)[:ROWS]):
            has_map = rank == 0 and head in mapped
            wanted.setdefault(text, []).append(_Wanted(head, metric, position, value, has_map))
    return wanted


def _rows(
    loaded: PretrainedModel, corpus: Corpus, wanted: Mapping[int, Sequence[_Wanted]]
) -> dict[Head, list[StrongRow]]:
    """The strongest rows of every head, whose texts run once more."""
    rows: dict[Head, list[StrongRow]] = {}
    for text, places in wanted.items():
        rec = run_recorded(loaded, corpus.texts[text], ("entropy",), set())
        for each in places:
            weights = rec.weights(*each.head, None if each.has_map else [each.position])[0]  # (L or 1, S)
            rows.setdefault(each.head, []).append(_row(each, text, corpus.tokens[text].names, weights))
    return {head: sorted(found, key=lambda row: (-row.value, row.whole is None)) for head, found in rows.items()}


def _row(wanted: _Wanted, text: int, names: Sequence[str], weights: Tensor) -> StrongRow:
    row = weights[wanted.position if wanted.has_map else 0].tolist()
    best = sorted(range(len(row)), key=lambda key: -row[key])[:KEYS]
    return StrongRow(
        wanted.metric,
        wanted.value,
        text,
        wanted.position,
        _context(names, row, wanted.position, best[0]),
        [(names[key], key, row[key]) for key in best if row[key] >= LEAST_WEIGHT],
        _map(names, weights, wanted.position, best[0]) if wanted.has_map else None,
    )


def _context(names: Sequence[str], row: Sequence[float], query: int, key: int) -> list[tuple[str, int, float] | None]:
    """The tokens around the query and around its largest key, with ``None`` between them where some are left out."""
    near = {*range(query - AROUND, query + AROUND + 1), *range(key - BEYOND, key + BEYOND + 1)}
    context: list[tuple[str, int, float] | None] = []
    for at in range(len(names)):
        if at in near:
            context.append((names[at], at, row[at]))
        elif not context or context[-1] is not None:
            context.append(None)
    return context


def _map(names: Sequence[str], weights: Tensor, query: int, key: int) -> WholeMap:
    """At most `MAP` tokens around the query and its largest key, or around the query if these are too far apart."""
    middle = (query + key) // 2 if abs(query - key) < MAP else query
    first = max(0, min(middle - MAP // 2, len(names) - MAP))
    part = slice(first, first + MAP)
    return WholeMap(first, names[part], weights[part, part])


def _padded(batch: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(text["input_ids"].shape[1] for text in batch)
    return {
        name: torch.cat([torch.nn.functional.pad(text[name], (0, longest - text[name].shape[1])) for text in batch])
        for name in batch[0]
    }
