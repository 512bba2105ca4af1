"""The calls in a record, as a mapping from layers to their calls."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView

from .._checks import index, shown
from .._statistics.recorded import Recorded
from .._statistics.result import AttentionStatistics
from .._statistics.stacks import Sides
from .._statistics.summary import fold
from ..errors import UnknownNameError
from ._calls import Calls
from ._chosen_layers import ChosenLayers
from ._naming import Layer


class RecordedCalls(Recorded):
    """The layers of a record and their calls. The name of a module that runs as several layers has all their calls.

    Args:
        layers: the chosen layers, and the order in which they ran.
    """

    def __init__(self, layers: ChosenLayers) -> None:
        self._layers = layers
        self._calls: dict[Layer, Calls] = {}
        self._sides: dict[Layer, Sides] = {}

    @property
    def _layers_by_name(self) -> dict[str, Layer]:
        """The recorded layers by name, in running order."""
        return {name: layer for name, layer in self._layers.names.items() if layer in self._calls}

    def __getitem__(self, name: str) -> Calls:
        layers = self._layers_by_name
        if isinstance(name, str) and name in layers:
            return self._calls[layers[name]].named(name)
        runs = [calls for layer, calls in self._calls.items() if isinstance(name, str) and layer.module == name]
        if not runs:
            recorded = ", ".join(map(repr, layers))
            raise UnknownNameError(f"name {shown(name)}: no attention was recorded there; recorded are {recorded}")
        return Calls.of_runs(name, runs)

    def items(self) -> ItemsView[str, Calls]:
        """The name and the calls of every layer."""
        return ItemsView(self)

    def values(self) -> ValuesView[Calls]:
        """The calls of every layer."""
        return ValuesView(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers_by_name)

    def __len__(self) -> int:
        return len(self._calls)

    def name_of(self, layer: int | str) -> str:
        """The name of a layer: its number in running order, or its name.

        Raises:
            UnknownNameError: for a layer without a recorded call.
        """
        order = list(self._layers.names)
        name = layer if isinstance(layer, str) else order[index("layer", layer, len(order))]
        if name not in self:
            recorded = ", ".join(map(repr, self))
            got = shown(name) if name == layer else f"{layer}, {name!r}"
            raise UnknownNameError("layer", expected=f"one of {recorded}, which were recorded", got=got)
        return name

    def sides(self, layer: int | str) -> Sides:
        """The stacks of a layer's queries and keys, in the first call of the model in which it ran."""
        return self._sides[self._layer(layer)]

    def _layer(self, layer: int | str) -> Layer:
        """A layer by number or name. The name of a module with several runs stands for the first."""
        name = self.name_of(layer)
        return self._layers_by_name.get(name, Layer(name))

    def reduce(self) -> dict[str, AttentionStatistics]:
        """Concatenate the calls of every layer along the batch.

        Shorter calls are padded with zeros (−1 in top-k indices). The padding is not ``counted``.

        Returns:
            One `AttentionStatistics` per layer.
        """
        return {name: fold(calls.statistics) for name, calls in self.items()}

    def __repr__(self) -> str:
        names = ", ".join(name or "the model itself" for name in self)
        what = "attention layers" if any(layer.run for layer in self._calls) else "attention modules"
        return f"<record of {len(self)} {what}: {names or 'nothing yet'}>"
