"""The stacks of a record: layers over the same tokens, each of which reads what the one before it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

from ..errors import ArgumentError, ShapeError


class Sides(NamedTuple):
    """The stacks of a layer's queries and keys, as numbers.

    They are equal in self-attention, and differ in cross-attention.

    Example:
        >>> Sides(queries=1, keys=0)
        Sides(queries=1, keys=0)
    """

    queries: int
    keys: int


class WithStacks(Protocol):
    """A record."""

    def __iter__(self) -> Iterator[str]: ...

    def sides(self, layer: int | str) -> Sides | None: ...


def is_self(rec: WithStacks, layer: str) -> bool:
    """Whether a layer is self-attention, as far as is known."""
    sides = rec.sides(layer)
    return sides is None or sides.queries == sides.keys


def layers_in(rec: Iterable[str], module: str) -> list[str]:
    """The layers inside a module, in running order.

    Example:
        >>> layers_in({"encoder.layers.0": [], "decoder.layers.0": []}, "encoder")
        ['encoder.layers.0']
    """
    return [name for name in rec if name == module or name.startswith((f"{module}.", f"{module}/"))]


def layers_of(rec: Iterable[str], name: str) -> list[str]:
    """The layers of one module that runs as several layers, or the layer itself."""
    return [each for each in rec if each.startswith(f"{name}/")] or [name]


def stack_label(layers: Sequence[str]) -> str:
    """The module around layers, such as ``vision_model.encoder.layers``.

    Example:
        >>> stack_label(["encoder.layers.0.attention", "encoder.layers.1.attention"])
        'encoder.layers'
        >>> stack_label(["attention/0", "attention/1"])
        'attention'
    """
    if len(layers) == 1:
        return layers[0]
    parts = zip(*(name.partition("/")[0].split(".") for name in layers), strict=False)
    return ".".join(places[0] for places in takewhile(lambda places: len(set(places)) == 1, parts))


def require_one_stack(rec: WithStacks, layers: Sequence[str]) -> None:
    """Raise `ShapeError` unless these layers are self-attention of one stack."""
    groups = _groups(rec, layers)
    if len(groups) > 1 or not all(is_self(rec, name) for name in layers):
        labels = [stack_label(names) for names in groups]
        described = [
            f"{label or 'the model'} ({'self' if is_self(rec, names[0]) else 'cross'}-attention, {len(names)})"
            for label, names in zip(labels, groups, strict=True)
        ]
        raise ShapeError(
            "layers",
            expected="self-attention layers of one stack",
            got=f"layers of {', '.join(described)}",
            fix=_advice(rec, [names for names in groups if is_self(rec, names[0])]),
        )


def require_same_side(rec: WithStacks, layers: Sequence[str], name: str, side: Literal["queries", "keys"]) -> None:
    """Raise `ArgumentError` unless the queries or keys of all layers are the same tokens. `name` is the argument."""
    known = {getattr(sides, side) for sides in map(rec.sides, layers) if sides is not None}
    if len(known) > 1:
        groups = _groups(rec, layers)
        got = f"a text beside layers of {', '.join(stack_label(names) or 'the model' for names in groups)}"
        expected = f"layers whose {side} are the same tokens, where it is a text"
        raise ArgumentError(name, expected=expected, got=got, fix=_advice(rec, groups))


def _groups(rec: WithStacks, layers: Sequence[str]) -> list[list[str]]:
    """The layers by the stacks of their queries and keys."""
    groups: dict[Sides | None, list[str]] = {}
    for name in layers:
        groups.setdefault(rec.sides(name), []).append(name)
    return list(groups.values())


def _advice(rec: WithStacks, groups: Sequence[Sequence[str]]) -> str:
    if not groups:
        return ""
    label = stack_label(groups[0])
    inside = [name for name in layers_in(rec, label) if is_self(rec, name)]
    return f"Choose some, such as layers={label if inside == list(groups[0]) else list(groups[0])!r}."
