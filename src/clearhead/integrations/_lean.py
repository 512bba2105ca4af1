"""Encoders whose layers run in Clearhead's own loop, where nothing else could see or change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .._encoder.layers import LayerParts, LeanLayers
from .._encoder.products import few_rows
from .._encoder.steps import TYPES, Norm
from .._encoder.unchanged import Unchanged, picture_of
from .._environment import Environment, forced_linears
from .._native import extension, why_missing
from .._torch_private import function_modes
from ._unpad_checks import collects_outputs, is_of_the_library


class Reading(NamedTuple):
    """What was read from an encoder.

    Args:
        modules: whose code the loop replaces.
        layers: in their order.
        norm_first: pre-norm.
        last_norm: of a pre-norm encoder's output.
    """

    modules: list[nn.Module]
    layers: list[LayerParts]
    norm_first: bool
    last_norm: Norm | None


#: Reads an encoder. Raises ValueError with the reason why its modules' own code must run.
Read = Callable[[Any], Reading]


class _Lean:
    """The layers of one encoder, and the modules that they were read from."""

    def __init__(self, encoder: nn.Module, reading: Reading, dtype: torch.dtype) -> None:
        modules, config = reading.modules, getattr(encoder, "config", None)
        fields = {} if config is None else vars(config)
        self._unchanged = Unchanged(modules, encoder.__dict__["_modules"], fields, is_of_the_library)
        if not self._unchanged.holds():
            raise ValueError("one of its modules has hooks or other code, or is in training")
        parameters = [each for module in modules for each in module.parameters(recurse=False)]
        self.layers = LeanLayers(reading.layers, parameters, dtype, reading.norm_first, reading.last_norm)

    def holds(self) -> bool:
        return self._unchanged.holds() and self.layers.are_current()


#: An encoder's layers, or a picture of an encoder whose modules' own code must run.
_known: WeakKeyDictionary[nn.Module, _Lean | int] = WeakKeyDictionary()


def _read(encoder: nn.Module, read: Read) -> Reading | str:
    """What the loop needs of an encoder, or the reason why its modules' own code runs."""
    if extension is None:
        return why_missing
    parameters = list(encoder.parameters())
    if not all(type(each) is nn.Parameter and each.is_cpu and each.layout is torch.strided for each in parameters):
        return "not all of its parameters are plain tensors on the CPU"
    if not all(map(torch.Tensor.is_contiguous, parameters)):
        return "one of its parameters is not contiguous"
    if any(each.data_ptr() == 0 and each.numel() > 0 for each in parameters):
        return "one of its parameters has no memory now"
    kinds = {each.dtype for each in parameters}
    if len(kinds) != 1 or not kinds <= TYPES.keys():
        return "its parameters are neither float32 nor bfloat16"
    try:
        return read(encoder)
    except (AttributeError, ValueError) as error:
        return str(error)


def describe_loop(encoder: nn.Module, dtype: torch.dtype | None, read: Read) -> str:
    """How the layers of an encoder run, for a report."""
    reading = _read(encoder, read)
    if isinstance(reading, str):
        return f"its layers run by their own code: {reading}"
    maps = [map for layer in reading.layers for map in layer.maps]
    used = dtype or maps[0].weight.dtype
    merged = [map for layer in reading.layers for map in layer.inputs if len(layer.inputs) > 1]
    as_they_are = maps if used != maps[0].weight.dtype else merged
    copied = [*maps, *(as_they_are if few_rows() else ())]
    megabytes = sum(map.weight.numel() for map in copied) * used.itemsize / 1e6
    return f"its layers run in one loop in inference, in {used}, on up to {megabytes:.3g} MB of copies of their weights"


def lean_layers(
    encoder: nn.Module, dtype: torch.dtype | None, environment: Environment, read: Read
) -> LeanLayers | None:
    """The layers of an encoder, ready to run; ``None`` where a call must run their modules' own code."""
    if encoder.training or _is_seen(encoder, environment):
        return None
    known = _known.get(encoder)
    if isinstance(known, _Lean) and known.holds():
        return known.layers
    picture = picture_of(encoder)
    if known == picture:
        return None
    forget(encoder)  # before new copies are made
    made = _make(encoder, dtype, read)
    _known[encoder] = picture if made is None else made
    return None if made is None else made.layers


def _make(encoder: nn.Module, dtype: torch.dtype | None, read: Read) -> _Lean | None:
    reading = _read(encoder, read)
    if isinstance(reading, str):
        return None
    try:
        return _Lean(encoder, reading, dtype or reading.layers[0].output.weight.dtype)
    except ValueError:
        return None


def forget(encoder: nn.Module) -> None:
    """Free the copies of an encoder."""
    _known.pop(encoder, None)


def _is_seen(encoder: nn.Module, environment: Environment) -> bool:
    """Whether something around the call would see, change or record what the layers' own code does."""
    if environment.sees_modules:
        return True
    if environment.autocast or environment.tracing or forced_linears.value or not torch.backends.mkldnn.enabled:
        return True
    if torch.get_float32_matmul_precision() != "highest" or collects_outputs() or function_modes():
        return True
    return environment.gradients and any(parameter.requires_grad for parameter in encoder.parameters())
