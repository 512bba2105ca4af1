"""The choice of the recorded layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .._checks import integer, items, shown
from ..errors import ArgumentError
from ._naming import Layer, layer_names, module_of


class ChosenLayers:
    """Layers, chosen by the names of their modules, by their own names, or by number in running order.

    Args:
        layers: names and numbers; ``None`` for all.
        model: the recorded model.
    """

    def __init__(self, layers: Sequence[int | str] | None, model: nn.Module) -> None:
        self._layers = _checked(layers, model)
        self.order: list[Layer] = []  # all layers in running order

    @property
    def names(self) -> dict[str, Layer]:
        """All layers by name, in running order."""
        return layer_names(self.order)

    def include(self, layer: Layer) -> bool:
        """Whether a running layer is chosen. A new layer gets the next number."""
        if layer not in self.order:
            self.order.append(layer)
        module, run = layer
        chosen = self._layers
        return chosen is None or not {module, f"{module}/{run}", self.order.index(layer)}.isdisjoint(chosen)

    def require_ran(self) -> None:
        """Raise if some of the chosen layers did not run, but others did."""
        known = {name for layer in self.order for name in (layer.module, f"{layer.module}/{layer.run}")}
        missing = [layer for layer in self._layers or () if layer not in known | set(range(len(self.order)))]
        if self.order and missing:
            names = ", ".join(map(repr, self.names))
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
        if isinstance(layer, str) and not {layer, module_of(layer)} & names:
            raise ArgumentError("layers", expected="names of the model's modules", got=shown(layer))
        if not isinstance(layer, str):
            integer("layers", layer, least=0, expected="numbers ≥ 0, in running order")
    return chosen
