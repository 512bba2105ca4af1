"""The choice of the recorded attention modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .._checks import integer, items, shown
from ..errors import ArgumentError


class ChosenLayers:
    """Attention modules, chosen by name or by number in running order.

    Args:
        layers: names and numbers; ``None`` for all.
        model: the recorded model.
    """

    def __init__(self, layers: Sequence[int | str] | None, model: nn.Module) -> None:
        self._layers = _checked(layers, model)
        self.order: list[str] = []  # names of all attention modules in running order

    def include(self, name: str) -> bool:
        """Whether a running module is chosen. A new module gets the next number."""
        if name not in self.order:
            self.order.append(name)
        return self._layers is None or name in self._layers or self.order.index(name) in self._layers

    def require_ran(self) -> None:
        """Raise if some of the chosen modules did not run, but other attention modules did."""
        ran = {*self.order, *range(len(self.order))}
        missing = [layer for layer in self._layers or () if layer not in ran]
        if self.order and missing:
            names = ", ".join(map(repr, self.order))
            expected = f"numbers below {len(self.order)}, or names among the attention modules that ran: {names}"
            raise ArgumentError("layers", expected=expected, got=", ".join(map(repr, missing)))


def _checked(layers: Sequence[int | str] | None, model: nn.Module) -> tuple[int | str, ...] | None:
    if layers is None:
        return None
    if isinstance(layers, (str, int)):
        got = shown(layers)
        raise ArgumentError("layers", expected="a list of names or numbers", got=got, fix=f"Write [{got}].")
    names = {name for name, _ in model.named_modules()}
    chosen = tuple(items("layers", layers, "a list of names or numbers"))
    if not chosen:
        raise ArgumentError("layers", expected="at least one name or number", got="none")
    for layer in chosen:
        if isinstance(layer, str) and layer not in names:
            raise ArgumentError("layers", expected="names of the model's modules", got=shown(layer))
        if not isinstance(layer, str):
            integer("layers", layer, least=0, expected="numbers ≥ 0, in running order")
    return chosen
