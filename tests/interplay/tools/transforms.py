"""`torch.func` transforms, by themselves, inside a compiled function, and around one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd import functional
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from ..subject import Numbers, Subject, cotangents, loss_of, named, noise
from ._tool import Tool

#: A function of the inputs alone, and what a transform makes of its results.
Of = Callable[..., tuple[Tensor, ...]]
#: Numbers that a transform computes from a function of the inputs.
Transform = Callable[[Of, tuple[Tensor, ...]], tuple[Tensor, ...]]
_SAMPLES, _DIRECTIONS = 3, 2


def _arguments(of: Any) -> tuple[int, ...]:
    return tuple(range(of))


def _grad(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return grad(lambda *x: loss_of(of(*x)), argnums=_arguments(len(inputs)))(*inputs)


def _vjp(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs, pull = vjp(of, *inputs)
    return (*outputs, *pull(cotangents(outputs)))


def _jvp(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs, tangents = jvp(of, inputs, _tangents(inputs))
    return (*outputs, *tangents)


def _forward_ad(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, tangent) for x, tangent in zip(inputs, _tangents(inputs), strict=True)]
        pairs = [forward_ad.unpack_dual(output) for output in of(*duals)]
    tangents = [torch.zeros_like(primal) if tangent is None else tangent for primal, tangent in pairs]
    return (*(pair.primal for pair in pairs), *tangents)


def _vmap(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return vmap(of)(*_samples(inputs))


def _vmap_grad(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return vmap(grad(lambda *x: loss_of(of(*x)), argnums=_arguments(len(inputs))))(*_samples(inputs))


def _jacfwd(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return jacfwd(_along(of, inputs))(inputs[0].new_zeros(_DIRECTIONS))


def _jacrev(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return jacrev(lambda step: loss_of(_along(of, inputs)(step))[None])(inputs[0].new_zeros(_DIRECTIONS)).unbind(0)


def _hessian(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (hessian(lambda step: loss_of(_along(of, inputs)(step)))(inputs[0].new_zeros(_DIRECTIONS)),)


def _tangents(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(noise(100 + n, x.shape, x) for n, x in enumerate(inputs))


def _samples(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x + noise(200 + n, (_SAMPLES, *x.shape), x) for n, x in enumerate(inputs))


def _along(of: Of, inputs: tuple[Tensor, ...]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The function of a few steps from the inputs, so that its derivatives are small."""
    directions = [noise(300 + n, (_DIRECTIONS, *x.shape), x) for n, x in enumerate(inputs)]

    def function(step: Tensor) -> tuple[Tensor, ...]:
        return of(*(x + torch.tensordot(step, d, 1) for x, d in zip(inputs, directions, strict=True)))

    return function


# The same numbers without `torch.func`, from backward passes.


def _backward_pass(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss_of(of(*leaves)), leaves)


def _outputs_and_backward_pass(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (*of(*inputs), *_backward_pass(of, inputs))


def _two_backward_passes(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs, tangents = functional.jvp(lambda *x: of(*x), inputs, _tangents(inputs))
    return (*outputs, *tangents)


def _looped(transform: Transform, of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    results = [transform(of, tuple(sample)) for sample in zip(*_samples(inputs), strict=True)]
    return tuple(map(torch.stack, zip(*results, strict=True)))


def _jacobian(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Column by column, because outputs are many and directions few."""
    start, along = inputs[0].new_zeros(_DIRECTIONS), _along(of, inputs)
    columns = [functional.jvp(along, start, direction)[1] for direction in torch.eye(_DIRECTIONS, dtype=start.dtype)]
    return tuple(torch.stack(column, -1) for column in zip(*columns, strict=True))


def _gradient_of_steps(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (functional.jacobian(lambda step: loss_of(_along(of, inputs)(step)), inputs[0].new_zeros(_DIRECTIONS)),)


def _second_derivatives(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (functional.hessian(lambda step: loss_of(_along(of, inputs)(step)), inputs[0].new_zeros(_DIRECTIONS)),)


def _call(of: Of, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return of(*inputs)


#: Of each transform, what it computes and how else to compute it; whether derivatives take part.
TRANSFORMS: dict[str, tuple[Transform, Transform, bool]] = {
    "grad": (_grad, _backward_pass, True),
    "vjp": (_vjp, _outputs_and_backward_pass, True),
    "jvp": (_jvp, _two_backward_passes, True),
    "forward AD": (_forward_ad, _two_backward_passes, True),
    "vmap": (_vmap, partial(_looped, _call), False),
    "vmap(grad)": (_vmap_grad, partial(_looped, _backward_pass), True),
    "jacfwd": (_jacfwd, _jacobian, True),
    "jacrev": (_jacrev, _gradient_of_steps, True),
    "hessian": (_hessian, _second_derivatives, True),
}


def _plain(transform: Transform, subject: Subject) -> Numbers:
    return named("result", transform(subject.outputs, subject.inputs))


def _inside(transform: Transform, subject: Subject) -> Numbers:
    """The transform in a compiled function."""
    compiled = torch.compile(lambda *inputs: transform(subject.outputs, inputs), backend="aot_eager")
    return named("result", compiled(*subject.inputs))


def _around(transform: Transform, subject: Subject) -> Numbers:
    """The transform of a compiled function."""
    return named("result", transform(torch.compile(subject.outputs, backend="aot_eager"), subject.inputs))


def _of_parameters(subject: Subject) -> Numbers:
    """Gradients of parameters per sample, `vmap` over `grad` of `functional_call`."""
    parameters = {name: x.detach() for name, x in subject.module.named_parameters() if x.requires_grad}

    def loss(parameters: dict[str, Tensor], *tensors: Tensor) -> Tensor:
        outputs = functional_call(subject.module, parameters, tuple(x[None] for x in tensors))
        return loss_of(outputs if isinstance(outputs, tuple) else (outputs,))

    per_sample = vmap(grad(loss), in_dims=(None, *[0] * (len(subject.inputs) + len(subject.given))))
    return {f"of {name}": x for name, x in per_sample(parameters, *subject.inputs, *subject.given).items()}


def per_sample_gradients(subject: Subject) -> Numbers:
    """The same in a loop of backward passes."""
    found: dict[str, list[Tensor]] = {}
    for sample in zip(*subject.inputs, *subject.given, strict=True):
        outputs = subject.module(*(x[None] for x in sample))
        parameters = {name: x for name, x in subject.module.named_parameters() if x.requires_grad}
        loss = loss_of(outputs if isinstance(outputs, tuple) else (outputs,))
        results = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        for name, gradient in zip(parameters, results, strict=True):
            found.setdefault(f"of {name}", []).append(gradient)
    return {name: torch.stack(results) for name, results in found.items()}


def _tools() -> list[Tool]:
    tools: list[Tool] = []
    for kind, way, slow in (("{}", _plain, False), ("{} in compile", _inside, True), ("{} of compiled", _around, True)):
        for name, (transform, otherwise, derives) in TRANSFORMS.items():
            needs = {"no dropout"} | ({"gradients"} if derives else set())
            found, expected = partial(way, transform), partial(_plain, otherwise)
            tools.append(Tool(kind.format(name), found, expected, frozenset(needs), slow=slow))
    needs = frozenset({"gradients", "parameters", "samples", "no dropout"})
    return [*tools, Tool("gradients per sample", _of_parameters, per_sample_gradients, needs)]


TOOLS = tuple(_tools())
