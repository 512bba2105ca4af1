"""From a record to what pictures hold: per batch item and layer, small tensors on the CPU without padding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._checks import shown
from .._statistics.compute import compute_statistics
from .._statistics.distributions import row_entropy
from .._statistics.recorded import Recorded
from .._statistics.result import AttentionStatistics
from .._statistics.summary import summarize
from .._statistics.vectors import TopK
from ..errors import DTypeError, RecordError, ShapeError
from ._patches import Tiles
from ._sections import Section, extent_of, find_sections, fitted, item_places, require_one_text, span_of
from ._tokens import Tokens
from ._words import has_pieces, merge_words

NEEDED = ("entropy", "received", "top_k", "map")


@dataclass(frozen=True)
class Crop:
    """Exact weights (queries, keys) of a part of one head.

    `queries` and `keys` are its first row and column, and one past its last, without padding. `word_entropy` is that of
    the rows merged into words. It exists for a whole head whose text has words of several tokens.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    weights: Tensor
    word_entropy: Tensor | None = None


@dataclass(frozen=True)
class LayerPicture:
    """One layer's heads on one batch item; l queries and s keys are no padding.

    Args:
        name: the module's.
        heads: the heads' numbers.
        size: (L, S) with padding, what `map` was pooled from.
        queries, keys: the extents (first, one past the last) of what is no padding.
        map: (H, R, C), exact where R = L and C = S.
        pooling: how `map` was pooled.
        entropy: (H, l) in nats. normalized_entropy: the same divided by ln of the visible keys.
        received: (H, s), Σ over queries.
        indices, weights: (H, l, k), the largest weights of each query; index −1 where there are fewer.
        numbers: statistic → (H,), means over the queries that see a key.
        crops: head → exact weights.
        word_entropy: (H, words), as `Crop`'s, where the map is exact.
        signed: whether all of this is a difference, with numbers below 0.
        rounded: whether a page holds an exact map in one byte per weight.
    """

    name: str
    heads: tuple[int, ...]
    size: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    map: Tensor
    pooling: str
    entropy: Tensor
    normalized_entropy: Tensor
    received: Tensor
    indices: Tensor
    weights: Tensor
    numbers: dict[str, Tensor]
    crops: dict[int, Crop] = field(default_factory=dict[int, Crop])
    word_entropy: Tensor | None = None
    signed: bool = False
    rounded: bool = False

    @property
    def exact(self) -> bool:
        """Whether the map holds single weights."""
        return tuple(self.map.shape[1:]) == self.size

    @property
    def exact_map(self) -> Tensor:
        """(H, l, s), where `exact`."""
        return self.map[:, slice(*self.queries), slice(*self.keys)]

    def head_map(self, place: int) -> Tensor:
        """The weights of the head at this place without padding, (l, s), or the best known tiles of them."""
        crop = self.crops.get(self.heads[place])
        if crop is not None and tuple(crop.weights.shape) == (self.entropy.shape[1], self.received.shape[1]):
            return crop.weights  # not a part of a text that is too long for a picture
        rows, columns = (
            slice(first * tiles // size, -(-last * tiles // size))
            for (first, last), tiles, size in zip((self.queries, self.keys), self.map.shape[1:], self.size, strict=True)
        )
        return self.map[place, rows, columns]


@dataclass(frozen=True)
class SectionPicture:
    """One kind of attention on one batch item."""

    section: Section
    queries: Tokens
    keys: Tokens
    layers: list[LayerPicture]
    tiles: Tiles | None = None


@dataclass(frozen=True)
class ItemPicture:
    """Everything about one batch item.

    `sections` are its kinds of attention, `picture` the input of a vision model, (3, height, width), uint8.
    """

    label: str
    sections: list[SectionPicture]
    picture: Tensor | None = None


def require_record(rec: object, name: str = "rec") -> None:
    """Raise unless a picture can be made of it."""
    if not isinstance(rec, Recorded):
        raise DTypeError(name, expected="a clearhead.record, or clearhead.plot.given(weights)", got=shown(rec))


def collect(
    rec: Recorded,
    tokens: Sequence[Tokens] | None = None,
    key_tokens: Sequence[Tokens] | None = None,
    layers: Collection[str] | None = None,
) -> list[ItemPicture]:
    """Take out of a record what pictures show, item by item.

    Args:
        rec: with the statistics entropy, received, top_k and map, or made with ``keep="queries_keys"``.
        tokens: of every batch item, or one for all. Default: numbers.
        key_tokens: of the source text, where there is one. Default: as `tokens` where queries and keys are the same,
            else numbers.
        layers: the layers to show. Default: all.

    Raises:
        ArgumentError: if tokens are given for layers of several stacks, or if layers have other numbers of calls or of
            batch items than the first.
        RecordError: if a statistic is missing and queries and keys were not kept; if it holds parts of sequences.
        ShapeError: if tokens do not fit.
    """
    if any(call.is_part for name in rec for call in rec[name]):
        expected, fix = (
            "whole sequences",
            "Draw what one process records; rec.summary() and plot_heads are of the whole.",
        )
        raise RecordError("rec", expected=expected, got="the parts that this process holds of them", fix=fix)
    sections = find_sections(rec, two_texts=key_tokens is not None)
    sections = [part for part in sections if layers is None or set(part.layers) <= set(layers)]
    shown_layers = [name for name in rec if any(name in section.layers for section in sections)]
    items: list[ItemPicture] = []
    places = item_places(rec, shown_layers)
    if tokens is not None:
        require_one_text(rec, sections)
    texts = {"tokens": tokens, "key_tokens": key_tokens}
    for what, given in texts.items():
        if given is not None and len(given) not in (1, len(places)):
            raise ShapeError(what, expected=f"{len(places)} texts, one per batch item", got=str(len(given)))
    complete: dict[tuple[str, int], AttentionStatistics] = {}
    for number, (call, item) in enumerate(places):
        if item == 0:
            complete = {(name, call): _completed(rec, name, call) for name in shown_layers}
        parts: list[SectionPicture] = []
        for section in sections:
            statistics = [complete[name, call] for name in section.layers]
            parts.append(_section(section, statistics, texts, number, item))
        items.append(ItemPicture(f"item {number}", parts))
    return items


def _completed(rec: Recorded, name: str, call: int) -> AttentionStatistics:
    """The statistics a picture needs; those that were not recorded are computed now."""
    statistics = rec[name][call]
    if all(needed in statistics.names for needed in NEEDED):
        return statistics
    try:
        kept = rec.kept_call(name, call)
    except RecordError as error:
        missing = ", ".join(needed for needed in NEEDED if needed not in statistics.names)
        raise RecordError(
            "rec",
            expected=f"the statistics {', '.join(NEEDED)}",
            got=f"a record without {missing}",
            fix=f"Record with statistics={NEEDED}, or with keep='queries_keys'.",
        ) from error
    computed = compute_statistics(kept, NEEDED, statistics.options, statistics.counted)
    group = range(statistics.averaged)
    return computed.with_heads([head * len(group) + place for head in statistics.heads for place in group])


def _section(
    section: Section,
    statistics: Sequence[AttentionStatistics],
    texts: Mapping[str, Sequence[Tokens] | None],
    number: int,
    item: int,
) -> SectionPicture:
    length, keys = statistics[0].query_length, statistics[0].key_length
    if any((other.query_length, other.key_length) != (length, keys) for other in statistics):
        raise ShapeError("rec", expected=f"L = {length} and S = {keys} in all of {section.layers}", got="others")
    queries = extent_of(statistics[0], item)
    # Keys that are hidden from all queries receive exactly nothing.
    received = torch.stack([each.received[item].sum(0) for each in statistics]).sum(0)  # (S,)
    extent = queries if section.same else span_of(received)
    side = "key_tokens" if section.kind == "encoder" else "tokens"
    query_tokens = fitted(side, texts[side], number, length, queries)
    key_tokens = query_tokens if section.same else fitted("key_tokens", texts["key_tokens"], number, keys, extent)
    layers = [
        _layer(name, each, item, (queries, extent), (query_tokens, key_tokens))
        for name, each in zip(section.layers, statistics, strict=True)
    ]
    return SectionPicture(section, query_tokens, key_tokens, layers)


def _layer(
    name: str,
    statistics: AttentionStatistics,
    item: int,
    extents: tuple[tuple[int, int], tuple[int, int]],
    texts: tuple[Tokens, Tokens],
) -> LayerPicture:
    rows, columns = slice(*extents[0]), slice(*extents[1])
    indices, weights = statistics.top_k.indices[item][:, rows], statistics.top_k.weights[item][:, rows]
    if extents[1] != (0, statistics.key_length):  # the largest weights of padded keys are left out
        indices = indices - extents[1][0]
        outside = (indices < 0) | (indices >= extents[1][1] - extents[1][0])
        indices, weights = indices.masked_fill(outside, -1), weights.masked_fill(outside, 0)
    picture = LayerPicture(
        name=name,
        heads=statistics.heads,
        size=(statistics.query_length, statistics.key_length),
        queries=extents[0],
        keys=extents[1],
        map=statistics.map[item].float().cpu(),
        pooling=statistics.options.map_pooling,
        entropy=statistics.entropy[item][:, rows].float().cpu(),
        normalized_entropy=statistics.normalized_entropy[item][:, rows].float().cpu(),
        received=statistics.received[item][:, columns].float().cpu(),
        indices=indices.cpu(),
        weights=weights.float().cpu(),
        numbers=_numbers(statistics, item),
    )
    if not picture.exact or not any(has_pieces(text) for text in texts):
        return picture
    entropy = row_entropy(merge_words(picture.exact_map, *texts))
    return replace(picture, word_entropy=entropy)


def _numbers(statistics: AttentionStatistics, item: int) -> dict[str, Tensor]:
    """The summary of one batch item: statistic → (H,)."""
    cut = slice(item, item + 1)
    results = {
        name: TopK(*(part[cut] for part in values)) if isinstance(values, TopK) else values[cut]
        for name, values in statistics.results.items()
    }
    one = statistics.like(results, statistics.counted[cut], statistics.key_length)
    return {name: layers[""].float().cpu() for name, layers in summarize({"": [one]}).values.items()}
