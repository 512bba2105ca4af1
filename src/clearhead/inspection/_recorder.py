"""The base of what reads the attention of a running model: records, and a census."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._call.call import Call
from .._call.naming import remember_names
from .._call.observers import observing
from .._checks import module
from .._statistics.stacks import Sides
from .._torch_private import in_backward, in_compiled_function, is_compiler_error
from ..errors import RecordError
from ._capture import CaptureMode, Unseen, obstacle
from ._chosen_layers import ChosenLayers
from ._flow import Flow
from ._naming import Layer, ModuleNames, uncompiled
from ._padding import CountedQueries
from ._patch_layout import picture_size

_UNCOMPILED = "Run it uncompiled: with torch.compiler.set_stance('force_eager'), clearhead.record(model) as rec: …"


def require_uncompiled() -> None:
    """Raise `RecordError` inside a compiled function, whose calls cannot be observed."""
    if in_compiled_function():
        raise RecordError(f"record: expected to be made outside of compiled functions. {_UNCOMPILED}")


class Recorder(ABC):
    """Follows a model inside a ``with`` block, and receives every attention call of the chosen layers.

    Args:
        model: the model.
        layers: the layers to receive.
        query_mask: bool or 0/1 (B, L), the counted queries; ``None`` to find padding.
    """

    recomputing = False

    def __init__(self, model: nn.Module, layers: ChosenLayers, query_mask: Tensor | None) -> None:
        self._layers = layers
        self._running = ModuleNames(module("model", model))
        self._flow = Flow(self._running)
        self._counted_queries = CountedQueries(query_mask, self._running, self._flow)
        remember_names(model)
        self._unseen = Unseen(self._running)
        self._picture_size: tuple[int, int] | None = None
        self._stack = ExitStack()

    @property
    @abstractmethod
    def _layers_seen(self) -> Collection[Layer]:
        """The layers that were received."""

    @abstractmethod
    def wanted(self) -> Hashable:
        """The settings that all processes need to share for the running module. ``None`` if it is not recorded."""

    @abstractmethod
    def _receive(self, layer: Layer, query: Tensor, call: Call, sides: Sides, output: Tensor | None) -> None:
        """Receive one call of a chosen layer, without gradients.

        Args:
            layer: the layer.
            query: the tensor from which the query of the call was read.
            call: the call.
            sides: its stacks.
            output: its output (B, H, L, Dv), if Clearhead computed it.
        """

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(uncompiled(self._running.model))
            stack.enter_context(self._running.following())
            stack.enter_context(observing(self))
            stack.enter_context(CaptureMode(self._captured, self._unseen.note, self._flow))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.stop()
        if kind is None:
            self.report_unseen()
        elif is_compiler_error(kind):
            problem = "record: a compiled function attended inside the block, where calls cannot be observed."
            raise RecordError(f"{problem} {_UNCOMPILED}") from error

    def start_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start in a forward pre-hook of the model, while its call with these arguments runs."""
        self.__enter__()
        model = self._running.model
        if hasattr(model, "_orig_mod"):  # torch.compile made it, and its compiled forward is called next
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._running.enter("", model, args, kwargs)

    def stop(self) -> None:
        """End the block without a report of unrecorded attention."""
        self._stack.close()

    def attended(self, call: Call, output: Tensor) -> Tensor:
        """Record a call of Clearhead's attention."""
        self._flow.mark(output, self._captured((call.query, call.key, call.value), lambda _: call, output))
        return output

    def _captured(self, inputs: Sequence[Any], read: Callable[[nn.Module], Call], output: Tensor | None = None) -> int:
        """Record one call, if the running layer is among `layers`. Returns the origins of its output."""
        name, what = self._running.current, obstacle(inputs)
        if name is None:
            return 0
        layer = self._flow.layer(name, inputs[0])
        is_chosen = self._layers.include(layer)
        if what is not None:
            if is_chosen:
                self._unseen.note(what)
            return self._flow.origins(inputs[0])
        sides, origins = self._flow.attended(layer, inputs[0], inputs[1])
        if is_chosen:
            root = self._running.frames[0]
            self._picture_size = self._picture_size or picture_size((root.args, root.kwargs))
            with torch.no_grad():
                self._receive(layer, inputs[0], read(self._running.model.get_submodule(name)), sides, output)
        return origins

    def report_unseen(self) -> None:
        """Raise if chosen layers did not run or nothing was recorded. Warn of attention that was not recorded."""
        if in_backward() and not self._layers_seen:
            got = "a block inside one that activation checkpointing computes again"
            fix = "Calls are not recorded twice. Record around the whole model, or around its backward pass too."
            raise RecordError("record", expected="a block around the checkpointed function", got=got, fix=fix)
        self._layers.require_ran()
        self._unseen.report({layer.module for layer in self._layers_seen})
