"""Which recorded modules attend to what: the sections of a picture, and whose tokens are on which side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .._statistics.recorded import Recorded
from .._statistics.result import AttentionStatistics
from ..errors import ArgumentError, ShapeError
from ._language import say
from ._tokens import Tokens, numbered_tokens

Kind = Literal["self", "encoder", "cross", "other"]
CROSS = re.compile(r"cross|encoder_attn|enc_?dec|multihead_attn|src_attn", re.IGNORECASE)
ENCODER = re.compile(r"(^|[._])encoder([._]|$)", re.IGNORECASE)
TITLES: dict[Kind, str] = {
    "self": "self-attention",
    "encoder": "encoder self-attention",
    "cross": "cross-attention",
    "other": "attention",
}


@dataclass(frozen=True)
class Section:
    """Modules of one kind and size, in the order in which they ran.

    ``"encoder"`` attends from the source text to itself, and ``"self"`` from the target text to itself. ``"cross"`` and
    ``"other"`` attend from the target to the source. `title` is the kind in words.
    """

    kind: Kind
    title: str
    layers: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return self.kind in ("self", "encoder")


def find_sections(rec: Recorded, *, two_texts: bool) -> list[Section]:
    """Group the recorded modules by what attends to what, from their names and sizes.

    `two_texts` means that the keys have tokens of their own.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True).eval()
        >>> with clearhead.record(model) as rec:
        ...     _ = model(torch.randn(1, 3, 8), torch.randn(1, 5, 8))
        >>> [(section.title, section.layers) for section in find_sections(rec, two_texts=True)]  # doctest: +ELLIPSIS
        [('encoder self-attention', ('encoder.layers.0.self_attn',)), ('decoder self-attention', ...), ...]
    """
    sizes = {name: (rec[name][0].query_length, rec[name][0].key_length) for name in rec}
    kinds: dict[str, Kind] = {name: _kind(name, *sizes[name]) for name in rec}
    has_cross = "cross" in kinds.values()
    if two_texts and not {"cross", "other"} & set(kinds.values()):
        kinds = dict.fromkeys(kinds, "other")
    groups: dict[tuple[Kind, tuple[int, int]], list[str]] = {}
    for name, kind in kinds.items():
        shown: Kind = "self" if kind == "encoder" and not has_cross else kind
        groups.setdefault((shown, sizes[name]), []).append(name)
    result: list[Section] = []
    for (kind, size), layers in groups.items():
        title = say("decoder self-attention") if kind == "self" and has_cross else say(TITLES[kind])
        if sum(other == kind for other, _ in groups) > 1:
            title += f", {size[0]} × {size[1]}"
        result.append(Section(kind, title, tuple(layers)))
    return result


def number_of_calls(rec: Recorded) -> int:
    """The number of calls of every module, or `ArgumentError` if that differs or is 0."""
    counts = {name: len(rec[name]) for name in rec}
    if not counts:
        raise ArgumentError("rec", expected="a record with calls", got="an empty one")
    if len(set(counts.values())) > 1:
        most, least = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
        raise ArgumentError(
            "rec",
            expected="equally many calls of every module",
            got=f"{counts[most]} of {most} and {counts[least]} of {least}",
            fix="Record one forward pass, or choose modules with record(..., layers=...).",
        )
    return next(iter(counts.values()))


def fitted(what: str, given: Sequence[Tokens] | None, item: int, length: int, extent: tuple[int, int]) -> Tokens:
    """The tokens of one batch item, without its padding.

    Args:
        what: the argument's name, for errors.
        given: one per item, or one for all. Default: numbers.
        item: its number.
        length: positions of the model, padding included.
        extent: first and one past the last position without padding.
    """
    if given is None:
        return numbered_tokens(length).cut(*extent)
    tokens = given[item] if len(given) > 1 else given[0]
    if len(tokens) == extent[1] - extent[0]:
        return tokens
    if len(tokens) == length:
        return tokens.cut(*extent)
    padded = "" if extent == (0, length) else f", or {extent[1] - extent[0]} without padding"
    raise ShapeError(
        what,
        expected=f"{length} tokens for item {item}{padded}",
        got=str(len(tokens)),
        fix="Where queries and keys are different texts, give tokens= and key_tokens=.",
    )


def extent_of(statistics: AttentionStatistics, item: int) -> tuple[int, int]:
    """First and one past the last query that is counted; everything if none is."""
    return span_of(statistics.counted[item])


def span_of(marks: Tensor) -> tuple[int, int]:
    """First and one past the last of (n,) that is not zero; everything if none is."""
    places = marks.nonzero().flatten()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, len(marks))


def _kind(name: str, queries: int, keys: int) -> Kind:
    if CROSS.search(name):
        return "cross"
    if queries != keys:
        return "other"
    return "encoder" if ENCODER.search(name) else "self"
