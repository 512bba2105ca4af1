"""Which recorded modules attend to what: the sections of a picture, and whose tokens are on which side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from .._statistics.recorded import Recorded
from .._statistics.result import AttentionStatistics
from .._statistics.stacks import Sides, stack_label
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
    """Layers of one kind, size and stack, in the order in which they ran.

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
    """Group the recorded layers by what attends to what, from their stacks, sizes and names.

    `two_texts` means that the keys have tokens of their own.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True).eval()
        >>> with clearhead.record(model) as rec:
        ...     _ = model(torch.randn(1, 3, 8), torch.randn(1, 5, 8))
        >>> [(section.title, section.layers) for section in find_sections(rec, two_texts=True)]  # doctest: +ELLIPSIS
        [('encoder self-attention', ('encoder.layers.0.self_attn',)), ('decoder self-attention', ...), ...]
    """
    kinds: dict[str, Kind] = _kinds(rec)
    has_cross = "cross" in kinds.values()
    if two_texts and not {"cross", "other"} & set(kinds.values()):
        kinds = dict.fromkeys(kinds, "other")
    groups: dict[_Group, list[str]] = {}
    for name, kind in kinds.items():
        kind_shown: Kind = "self" if kind == "encoder" and not has_cross else kind
        size = rec[name][0].query_length, rec[name][0].key_length
        groups.setdefault(_Group(kind_shown, size, rec.sides(name)), []).append(name)
    return [
        Section(group.kind, _title(group, groups, has_cross=has_cross), tuple(layers))
        for group, layers in groups.items()
    ]


class _Group(NamedTuple):
    """What the layers of a section share."""

    kind: Kind
    size: tuple[int, int]
    sides: Sides | None


def _title(group: _Group, groups: Mapping[_Group, Sequence[str]], *, has_cross: bool) -> str:
    """The kind in words. Sections of one kind differ by their stack, or by their size."""
    title = say("decoder self-attention") if group.kind == "self" and has_cross else say(TITLES[group.kind])
    alike = {other: stack_label(layers) for other, layers in groups.items() if other.kind == group.kind}
    if len({other.sides for other in alike}) > 1:
        is_clear = list(alike.values()).count(alike[group]) == 1
        title += f", {alike[group] if is_clear else groups[group][0]}"
    if sum(other.sides == group.sides for other in alike) > 1:
        title += f", {group.size[0]} × {group.size[1]}"
    return title


def number_of_calls(rec: Recorded, layers: Iterable[str] | None = None) -> int:
    """The number of calls of every layer, or `ArgumentError` if that differs or is 0. Default: of all layers."""
    counts = {name: len(rec[name]) for name in (rec if layers is None else layers)}
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


def item_places(rec: Recorded, layers: Iterable[str] | None = None) -> list[tuple[int, int]]:
    """Call and batch item of every picture item. Default: of all layers."""
    names = list(rec if layers is None else layers)
    places: list[tuple[int, int]] = []
    for call in range(number_of_calls(rec, names)):
        sizes = {name: rec[name][call].batch_size for name in names}
        if len(set(sizes.values())) > 1:
            most, least = max(sizes, key=lambda name: sizes[name]), min(sizes, key=lambda name: sizes[name])
            raise ArgumentError(
                "rec",
                expected="equally many batch items in every layer",
                got=f"{sizes[most]} in {most} and {sizes[least]} in {least}",
                fix="Choose layers that run on the same items with record(..., layers=...).",
            )
        places += [(call, item) for item in range(sizes[names[0]])]
    return places


def layers_like(rec: Recorded, name: str) -> list[str]:
    """The layers over the same queries and keys as one of them."""
    return [other for other in rec if rec.sides(other) == rec.sides(name)]


def require_one_text(rec: Recorded, sections: Sequence[Section]) -> None:
    """Raise if self-attention over several texts would have the same tokens."""
    selves = {rec.sides(part.layers[0]): part.layers for part in sections if part.kind == "self"}
    if len(selves) > 1:
        raise ArgumentError(
            "tokens",
            expected="layers over one text",
            got=f"self-attention in {' and in '.join(map(stack_label, selves.values()))}",
            fix="Leave tokens out, or record one of them with record(..., layers=...).",
        )


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


def _kinds(rec: Recorded) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for name in rec:
        is_square = all(call.query_length == call.key_length for call in rec[name])  # decoding steps are not
        kinds[name] = _kind(name, rec.sides(name), is_square=is_square)
    crossing = [rec.sides(name) for name, kind in kinds.items() if kind == "cross"]
    sources = {sides.keys for sides in crossing if sides is not None}
    for name, kind in kinds.items():
        sides = rec.sides(name)
        if kind == "self" and sides is not None and sides.queries in sources:
            kinds[name] = "encoder"
    return kinds


def _kind(name: str, sides: Sides | None, *, is_square: bool) -> Kind:
    is_known_cross = sides is not None and sides.queries != sides.keys and is_square
    if CROSS.search(name) or is_known_cross:
        return "cross"
    if not is_square:
        return "other"
    return "encoder" if ENCODER.search(name) else "self"
