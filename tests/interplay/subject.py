"""One call of a public entry, and its numbers: outputs, and the gradients of inputs and parameters."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

SEED = 20170612
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A call of a public entry, written as a module. A function is a module without parameters.

    Args:
        module: called with the inputs and then with what is given. It returns a tensor or several.
        inputs: floats that have gradients.
        given: other tensors: lengths, boundaries, marks of padding.
        full: what is given if nothing is padded; the same as `given` where there is no padding.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    given: tuple[Tensor, ...] = ()
    full: tuple[Tensor, ...] = field(default=())

    def double(self) -> Subject:
        """The same call in float64."""
        return replace(self, module=self.module.double(), inputs=tuple(x.double() for x in self.inputs))

    def leaves(self) -> tuple[Tensor, ...]:
        """New inputs of the same values that record gradients."""
        return tuple(x.detach().clone().requires_grad_() for x in self.inputs)

    def outputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """A function of the inputs alone, for tools that take one."""
        return as_tuple(self.module(*inputs, *self.given))

    def loss(self, *inputs: Tensor) -> Tensor:
        """The number whose gradients are compared, as a function of the inputs alone."""
        return loss_of(self.outputs(*inputs))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def noise(salt: int, shape: Iterable[int], like: Tensor) -> Tensor:
    """Numbers in [−2, 2] that depend only on a number and a shape, in graphs and transforms too, and in every dtype."""
    sizes = tuple(shape)
    places = torch.arange(math.prod(sizes), dtype=torch.float64)
    scattered = torch.sin(places * 12.9898 + 78.233 * (salt + 1)) * 43758.5453
    return ((scattered - scattered.floor()) * 4 - 2).reshape(sizes).to(like.dtype)


def salt_of(name: str) -> int:
    return zlib.crc32(name.encode()) % 1009


def cotangents(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(noise(n, output.shape, output) for n, output in enumerate(outputs))


def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
    pairs = zip(outputs, cotangents(outputs), strict=True)
    return torch.stack([(output * factor).sum() for output, factor in pairs if output.is_floating_point()]).sum()


def named(kind: str, tensors: Iterable[Tensor]) -> Numbers:
    return {f"{kind} {n}": tensor.detach() for n, tensor in enumerate(tensors)}


def numbers(subject: Subject, call: Callable[..., Any] | None = None) -> Numbers:
    """Outputs and gradients. `call` is what a tool made of the module."""
    inputs = subject.leaves()
    return backward(subject, inputs, forward(subject, inputs, call))


def forward(subject: Subject, inputs: tuple[Tensor, ...], call: Callable[..., Any] | None = None) -> tuple[Tensor, ...]:
    torch.manual_seed(SEED)  # of dropout
    return as_tuple((subject.module if call is None else call)(*inputs, *subject.given))


def backward(subject: Subject, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Numbers:
    """Outputs and, where there are any, gradients of the inputs and of the parameters that learn."""
    found = named("output", outputs)
    if not any(output.requires_grad for output in outputs):
        return found
    loss_of(outputs).backward()
    found |= {f"gradient of input {n}": x.grad for n, x in enumerate(inputs) if x.grad is not None}
    return found | gradients(subject.module)


def gradients(module: nn.Module) -> Numbers:
    """Gradients that parameters have accumulated, and none left."""
    found: Numbers = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
            parameter.grad = None
    return found


def inference(subject: Subject, call: Callable[..., Any] | None = None) -> Numbers:
    """Outputs alone, with nothing recorded."""
    with torch.no_grad():
        return named("output", forward(subject, subject.inputs, call))
