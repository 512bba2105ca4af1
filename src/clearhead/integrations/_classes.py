"""The class or the forward of a module, swapped in place, also below what other tools put around the module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

#: Where accelerate keeps the forward that its hooks surround.
_UNHOOKED = "_old_forward"


def swap_class(module: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> str | None:
    """Give a module of the class `old` the class `new`, whose forward then runs. Returns the reason if it cannot be.

    Classes that PyTorch makes on top of a module's class (parametrizations, `fully_shard`) are made again on top of the
    new one. Forwards that are attributes of the module, as accelerate's hooks set them, are bound to the new one.
    """
    kind = _made_on(type(module), old, new)
    if kind is None:
        return of_a_subclass(module)
    fields = vars(module)
    forward = fields.get("forward")
    if forward is not None:
        name = _UNHOOKED if _is_hook_of_accelerate(forward) else "forward"
        rebound = _rebound(fields.get(name), module, old, new)
        if rebound is None:
            return "its attribute forward replaces the forward of its class"
        fields[name] = rebound
        if name == _UNHOOKED:
            forward.__wrapped__ = rebound
    module.__class__ = kind
    return None


def replace_forward(module: nn.Module, function: Callable[..., Any], *arguments: object) -> None:
    """Let a module run ``function(module, *arguments, …)`` as its forward. ``del module.forward`` undoes it."""
    # Not a hook, because sentence-transformers calls `forward` itself. A `partial` can be copied and pickled.
    forward: Any = partial(function, module, *arguments)
    forward.__wrapped__ = module.forward  # for its signature
    module.forward = forward


def forward_is(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether `replace_forward` set this function as the forward of a module."""
    forward = module.__dict__.get("forward")
    forward = getattr(forward, "__func__", forward)  # accelerate's unwrap_model binds it again
    return isinstance(forward, partial) and forward.func is function


def of_a_subclass(module: nn.Module) -> str:
    """The reason why a module of another class than PyTorch's stays as it is."""
    return f"{type(module).__module__}.{type(module).__qualname__} is a subclass with code of its own"


def _made_on(kind: type, old: type, new: type) -> type | None:
    """`new` in the place of `old`, which is `kind` or what PyTorch made `kind` of. ``None`` for any other subclass."""
    if kind is old:
        return new
    if not _made_by_pytorch(kind):
        return None
    bases = [_made_on(base, old, new) if issubclass(base, old) else base for base in kind.__bases__]
    if None in bases:
        return None
    # Not in place: copies of the module share the class.
    fields = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, tuple(base for base in bases if base is not None), fields)


def _made_by_pytorch(kind: type) -> bool:
    """Whether PyTorch made a class at run time, without a forward of its own."""
    is_written = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return kind.__module__.startswith("torch.") and not is_written and "forward" not in vars(kind)


def _is_hook_of_accelerate(forward: Any) -> bool:
    return isinstance(forward, partial) and getattr(forward.func, "__module__", "").startswith("accelerate.")


def _rebound(forward: Any, module: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> Any:
    """A forward of the old class, bound to the module, as that of the new class. ``None`` for any other function."""
    if isinstance(forward, partial):
        inner = _rebound(forward.func, module, old, new)
        return None if inner is None else partial(inner, *forward.args, **forward.keywords)
    if isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is old.forward:
        return MethodType(new.forward, module)
    return None
