"""Calls that `torch.fx` records: nodes of its graph instead of results.

`torch.fx` runs a model with proxies in place of tensors. It records the functions and modules of PyTorch as nodes, and
does not look inside. Clearhead's attention is recorded in the same way. The functions here run after a call was refused
because an argument is no tensor, so ordinary calls pay nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

from torch import nn
from torch.fx import Proxy
from torch.overrides import handle_torch_function

from .errors import ClearheadError


def recorded_call(function: Callable[..., Any], error: ClearheadError, arguments: dict[str, Any]) -> Any:
    """The node of a call of a function. Raises the error if no argument is a proxy."""
    proxies = tuple(_proxies(arguments))
    if not proxies:
        try:
            arguments.clear()
            raise error
        finally:  # so that no cycle keeps the tensors of the call: the error's frames would hold the error
            del error
    args, kwargs = _as_called(function, arguments)
    return handle_torch_function(function, proxies, *args, **kwargs)


def recorded_module(module: nn.Module, error: ClearheadError, arguments: dict[str, Any]) -> Any:
    """The node of a call of a module. Raises the error if no argument is a proxy, or the module is the whole model."""
    for proxy in _proxies(arguments):
        tracer: Any = proxy.tracer
        name = tracer.path_of_module(module) if hasattr(tracer, "path_of_module") else ""
        if name:
            return tracer.create_proxy("call_module", name, *_as_called(module.forward, arguments))
        error.add_note("torch.fx records this module as one node. Trace a module that contains it.")
        break
    try:
        arguments.clear()
        raise error
    finally:  # as above
        del error


def quantizes(argument: object) -> bool:
    """Whether `torch.ao.quantization` records the call, which replaces functions and modules that it knows."""
    return isinstance(argument, Proxy) and type(argument.tracer).__module__.startswith("torch.ao.")


def _proxies(arguments: dict[str, Any]) -> Iterator[Proxy]:
    return (argument for argument in arguments.values() if isinstance(argument, Proxy))


def _as_called(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, without those that have their defaults."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(signature(function).parameters.items()):
        if arguments[name] is parameter.default:
            continue
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and len(args) == place:
            args.append(arguments[name])
        else:
            kwargs[name] = arguments[name]
    return tuple(args), kwargs
