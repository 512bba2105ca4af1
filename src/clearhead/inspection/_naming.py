"""The qualified name of the module that is running."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import getattr_static
from types import MethodType
from typing import Any

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


class ModuleNames:
    """Follows the forward calls of a model's modules in one thread.

    Args:
        model: the model. Its own name is ``""``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._thread = threading.get_ident()
        self._running: list[str] = []
        self.root_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @property
    def current(self) -> str | None:
        """Name of the innermost running module, ``None`` outside the model."""
        return self._running[-1] if self._running else None

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
            self._running.clear()

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module of this name starts to run with these arguments."""
        if threading.get_ident() != self._thread:
            return
        if not self._running:
            self.root_arguments = (args, kwargs)
        self._running.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._running:
            self._running.pop()
