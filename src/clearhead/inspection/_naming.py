"""Which module of a model is running right now, by its qualified name."""

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

from .._layer.unmodified import is_unmodified
from .._torch_private import as_written, calls_uncompiled
from ..errors import ArgumentError


@contextmanager
def uncompiled(model: nn.Module) -> Generator[None, None, None]:
    """Run the compiled parts of a model uncompiled inside the block: calls inside a graph cannot be observed."""
    with calls_uncompiled(model.modules()), ExitStack() as undo:
        for module in model.modules():
            # `forward` of what torch.compile(module) returns, or any compiled function put there
            for name, value in list(vars(module).items()):
                written = as_written(value)
                if written is not None:
                    undo.callback(setattr, module, name, value)
                    setattr(module, name, written)
            written = as_written(getattr_static(type(module), "forward", None))
            if "forward" not in vars(module) and written is not None:
                undo.callback(vars(module).pop, "forward", None)
                module.forward = MethodType(written, module)
        yield


class ModuleNames:
    """Follows the forward calls of a model's modules in the thread that entered it.

    Args:
        model: whose submodules are named; the model itself is ``""``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._thread = threading.get_ident()
        self._running: list[str] = []
        self.root_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @property
    def current(self) -> str | None:
        """Name of the innermost module that is running, ``None`` outside the model."""
        return self._running[-1] if self._running else None

    @contextmanager
    def following(self) -> Generator[ModuleNames, None, None]:
        """Attach hooks to every module inside the block, and take every one of them away after it.

        But for unmodified linear layers: nothing attends in them, and layers multiply with their parameters themselves.
        """
        self._thread = threading.get_ident()
        handles: list[Any] = []
        try:
            for name, module in self.model.named_modules():
                if is_unmodified(module):
                    continue
                if isinstance(module, torch.jit.ScriptModule):
                    raise ArgumentError(
                        "model",
                        expected="modules that run in Python",
                        got=f"{name or 'the model itself'!r}, which is TorchScript",
                        fix="Take the model as it was before torch.jit.",
                    )
                handles.append(
                    module.register_forward_pre_hook(partial(self._entering, name), with_kwargs=True, prepend=True)
                )
                handles.append(module.register_forward_hook(self._leaving, always_call=True))
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def _entering(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.enter(name, args, kwargs)

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module of this name begins to run with these arguments."""
        if threading.get_ident() != self._thread:
            return
        if not self._running:
            self.root_arguments = (args, kwargs)
        self._running.append(name)

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._running:
            self._running.pop()
