"""Encoders whose layers run in Clearhead's own loop, where nothing else could see or change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from .._encoder.layers import LeanLayers
from .._encoder.products import few_rows
from .._encoder.steps import TYPES
from .._encoder.unchanged import HOOKS, Picture
from .._environment import Environment, forced_linears
from .._native import extension, why_missing
from .._torch_private import function_modes
from ._unpad_checks import collects_outputs, is_of_the_library

#: Reads an encoder: its layers in a dtype, by default its own, and the modules whose code they replace. Raises
#: ValueError or AttributeError with the reason why that code must run.
Read = Callable[[Any, torch.dtype | None], tuple[LeanLayers, list[nn.Module]]]


@final
class Loop:
    """The loop over one encoder's layers. Copies and pickles of it have read nothing yet.

    Args:
        dtype: of the loop. Default: the encoder's.
        read: how the encoder is read.
    """

    def __init__(self, dtype: torch.dtype | None, read: Read) -> None:
        self._dtype, self._read = dtype, read
        self._picture: Picture | None = None
        self._layers: LeanLayers | None = None

    def __reduce__(self) -> tuple[type[Loop], tuple[torch.dtype | None, Read]]:
        return Loop, (self._dtype, self._read)

    def layers_of(self, encoder: nn.Module, environment: Environment) -> LeanLayers | None:
        """The layers, ready to run; ``None`` where a call must run their modules' own code."""
        if encoder.training or _is_seen(encoder, environment):
            return None
        if self._picture is None or not self._picture.holds():
            self._picture = self._layers = None  # before new copies are made
            found, config = _read(encoder, self._dtype, self._read), getattr(encoder, "config", None)
            settings = encoder.__dict__["_modules"], {} if config is None else vars(config)
            if isinstance(found, str) or any(module.training for module in found[1]):
                self._picture = Picture(list(encoder.modules()), *settings)  # whatever changes may end the refusal
            else:
                self._layers, self._picture = found[0], Picture(found[1], *settings)
        return self._layers

    def describe(self, encoder: nn.Module) -> str:
        """How the layers of an encoder run, for a report."""
        found = _read(encoder, self._dtype, self._read)
        if isinstance(found, str):
            return f"its layers run by their own code: {found}"
        used = found[0].dtype
        products = [product for layer in found[0].layers for product in layer.products]
        copied = [weight for product in products for weight in product.weights]
        if few_rows():  # these too, where they are not as they are
            others = [each.weights for each in products if len(each.weights) > 1 or each.weights[0].dtype != used]
            copied += [weight for weights in others for weight in weights]
        megabytes = sum(weight.numel() for weight in copied) * used.itemsize / 1e6
        copies = f"on up to {megabytes:.3g} MB of copies of their weights"
        return f"its layers run in one loop in inference, in {used}, {copies}"


def _read(encoder: nn.Module, dtype: torch.dtype | None, read: Read) -> tuple[LeanLayers, list[nn.Module]] | str:
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
        found = read(encoder, dtype)
    except (AttributeError, ValueError) as error:
        return str(error)
    fields = [module.__dict__ for module in found[1]]
    hooks = [hook for each in fields for name in HOOKS for hook in each[name].values()]
    if any("forward" in each for each in fields) or not all(map(is_of_the_library, hooks)):
        return "one of its modules has hooks or another forward"
    return found


def _is_seen(encoder: nn.Module, environment: Environment) -> bool:
    """Whether something around the call would see, change or record what the layers' own code does."""
    if environment.sees_modules:
        return True
    if environment.autocast or environment.tracing or forced_linears.value or not torch.backends.mkldnn.enabled:
        return True
    if torch.get_float32_matmul_precision() != "highest" or collects_outputs() or function_modes():
        return True
    return environment.gradients and any(parameter.requires_grad for parameter in encoder.parameters())
