"""The names of layers, and the modules that are running, with their arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import getattr_static
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._layer.unmodified import takes_packed
from .._torch_private import as_written, calls_uncompiled
from ..errors import ArgumentError


@contextmanager
def uncompiled(model: nn.Module) -> Generator[None, None, None]:
    """Run a model uncompiled inside the block, because calls inside a compiled graph cannot be observed."""
    with calls_uncompiled(model.modules()), ExitStack() as undo:
        for module in model.modules():
            # An attribute is compiled if it is the `forward` of torch.compile(module), or a user's compiled function.
            for name, value in list(vars(module).items()):
                original = as_written(value)
                if original is not None:
                    undo.callback(setattr, module, name, value)
                    setattr(module, name, original)
            original = as_written(getattr_static(type(module), "forward", None))
            if "forward" not in vars(module) and original is not None:
                undo.callback(vars(module).pop, "forward", None)
                module.forward = MethodType(original, module)
        yield


class Layer(NamedTuple):
    """One layer: an attention module, and how often it ran before in the same chain of layers.

    A module that the model uses for several layers, as ALBERT does, has several runs. Each reads what the one before it
    computed. A module that runs on several texts has one run, and several calls.
    """

    module: str
    run: int = 0


def layer_names(layers: Iterable[Layer]) -> dict[str, Layer]:
    """Layers by their names: that of the module, followed by ``/`` and the run if the module has several.

    Example:
        >>> list(layer_names([Layer("first"), Layer("shared", 0), Layer("shared", 1)]))
        ['first', 'shared/0', 'shared/1']
    """
    layers = list(layers)
    several = {layer.module for layer in layers if layer.run > 0}
    return {f"{layer.module}/{layer.run}" if layer.module in several else layer.module: layer for layer in layers}


def module_of(layer: str) -> str:
    """The module of a layer's name.

    Example:
        >>> module_of("shared/3"), module_of("encoder.attention")
        ('shared', 'encoder.attention')
    """
    module, _, run = layer.rpartition("/")
    return module if run.isdecimal() else layer


class Frame:
    """A running call of a module.

    Attributes:
        origins: what the attention inside it was computed from, for `Flow`.
    """

    def __init__(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.module, self.args, self.kwargs = name, module, args, kwargs
        self.origins = 0


class ModuleNames:
    """Follows the forward calls of a model's modules in one thread.

    The outermost running call is a *root call*, usually of the model itself. Each text, batch and decoding step has a
    root call of its own.

    Args:
        model: the model. Its own name is ``""``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._thread = threading.get_ident()
        self.frames: list[Frame] = []  # the root call first
        self.left: Callable[[Frame, object], None] | None = None  # receives a call that ends, and its output
        self.root_calls = 0

    @property
    def current(self) -> str | None:
        """Name of the innermost running module, ``None`` outside the model."""
        return self.frames[-1].name if self.frames else None

    @contextmanager
    def following(self) -> Generator[None, None, None]:
        """Attach hooks to the modules inside the block, and remove them after it.

        Unmodified linear layers, norms and rotary positions get no hooks, because attention layers then keep their
        fast path.
        """
        self._thread = threading.get_ident()
        handles: list[Any] = []
        try:
            for name, module in self.model.named_modules():
                if takes_packed(module):
                    continue
                if isinstance(module, torch.jit.ScriptModule):
                    got = f"{name or 'the model itself'!r}, which is TorchScript"
                    fix = "Take the model as it was before torch.jit."
                    raise ArgumentError("model", expected="modules that run in Python", got=got, fix=fix)
                enter = partial(self.enter, name)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.frames.clear()

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module of this name starts to run with these arguments."""
        if threading.get_ident() != self._thread:
            return
        if not self.frames:
            self.root_calls += 1
        self.frames.append(Frame(name, module, args, kwargs))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self.frames:
            frame = self.frames.pop()
            if self.left is not None:
                self.left(frame, output)
