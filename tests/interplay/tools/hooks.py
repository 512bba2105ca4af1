"""Hooks on every sub-module, and on all modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..subject import Numbers, Subject, forward, numbers
from ._tool import Tool

#: Registers a hook on one module.
Register = Callable[[nn.Module], Any]
_FACTOR = 1.125


def _looks(*_: object) -> None:
    """A hook that changes nothing."""


@contextmanager
def _hooked(module: nn.Module, register: Register) -> Iterator[None]:
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(register(part))
        yield


def _on_every_module(register: Register, subject: Subject) -> Numbers:
    with _hooked(subject.module, register):
        return numbers(subject)


def _globally(register: Callable[[Any], Any], subject: Subject) -> Numbers:
    with register(_looks):
        return numbers(subject)


def _scaled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * _FACTOR if isinstance(output, Tensor) else output


def _changed_linears(subject: Subject) -> Numbers:
    """Hooks that enlarge what linear layers return."""
    with ExitStack() as stack:
        for part in _linears(subject.module):
            stack.enter_context(part.register_forward_hook(_scaled))
        return numbers(subject)


def _larger_linears(subject: Subject) -> Numbers:
    """The same without hooks: larger parameters. Their gradients are larger by the chain rule."""
    parts = _linears(subject.module)
    with torch.no_grad():
        for parameter in {id(p): p for part in parts for p in part.parameters(recurse=False)}.values():
            parameter.mul_(_FACTOR)
    scaled = {
        f"gradient of {name}"
        for name, p in subject.module.named_parameters()
        if any(p is q for part in parts for q in part.parameters())
    }
    return {name: x * _FACTOR if name in scaled else x for name, x in numbers(subject).items()}


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def _seen(subject: Subject) -> Numbers:
    """The sizes of the first input and of the output that hooks of every sub-module see."""
    sizes: Numbers = {}

    def hook(name: str, _: nn.Module, args: Any, output: Any) -> None:
        tensors = [*[x for x in args if isinstance(x, Tensor)][:1], *[x for x in (output,) if isinstance(x, Tensor)]]
        sizes[name] = torch.tensor([size for x in tensors for size in (x.dim(), *x.shape)])

    with ExitStack() as stack:
        for name, part in subject.module.named_modules():
            stack.enter_context(part.register_forward_hook(partial(hook, name)))
        forward(subject, subject.leaves())
    return sizes


def _seen_without_padding(subject: Subject) -> Numbers:
    return _seen(replace(subject, given=subject.full))


_MODULES = frozenset({"parameters"})
_BACKWARD = _MODULES | {"gradients"}
TOOLS = (
    Tool("forward hooks", partial(_on_every_module, lambda part: part.register_forward_hook(_looks)), needs=_MODULES),
    Tool(
        "forward pre-hooks",
        partial(_on_every_module, lambda part: part.register_forward_pre_hook(_looks)),
        needs=_MODULES,
    ),
    Tool(
        "backward hooks",
        partial(_on_every_module, lambda part: part.register_full_backward_hook(_looks)),
        needs=_BACKWARD,
    ),
    Tool(
        "backward pre-hooks",
        partial(_on_every_module, lambda part: part.register_full_backward_pre_hook(_looks)),
        needs=_BACKWARD,
    ),
    Tool("global forward hook", partial(_globally, nn.modules.module.register_module_forward_hook)),
    Tool("global forward pre-hook", partial(_globally, nn.modules.module.register_module_forward_pre_hook)),
    Tool(
        "global backward hook",
        partial(_globally, nn.modules.module.register_module_full_backward_hook),
        needs=frozenset({"gradients"}),
    ),
    Tool("hooks that change outputs", _changed_linears, _larger_linears, needs=_BACKWARD | {"linears"}),
    Tool("hooks that look at sizes", _seen, _seen_without_padding, needs=_MODULES),
)
