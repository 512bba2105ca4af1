"""Derivatives of results, and derivatives against finite differences, alone and many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.functional import hessian, jacobian

Outputs = Tensor | Sequence[Tensor]
Function = Callable[..., Outputs]
Loss = Callable[[Sequence[Tensor]], Tensor]

#: Arguments of a module's call.
WEIGHTS: dict[str, dict[str, Any]] = {
    "without weights": {"need_weights": False},
    "averaged": {"need_weights": True},
    "per head": {"need_weights": True, "average_attn_weights": False},
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def finite(outputs: Outputs) -> Outputs:
    """Without −∞, of which there are no finite differences."""
    if isinstance(outputs, Tensor):
        return outputs.masked_fill(outputs.isinf(), 0)
    return tuple(output.masked_fill(output.isinf(), 0) for output in outputs)


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all numbers."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


def sines(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the sines of all numbers."""
    return torch.stack([tensor.sin().sum() for tensor in tensors]).sum()


def derivatives(
    results: Outputs,
    wanted: Sequence[Tensor],
    losses: Sequence[Loss] = (squares,),
    *,
    unused: bool = False,
    retain_graph: bool = False,
) -> list[Tensor]:
    """Results and their gradients in tensors.

    Args:
        results: of a function, one or several.
        wanted: the tensors to differentiate in.
        losses: the first is of the results, and each one after it of the gradients of the one before: two losses give
            second derivatives too.
        unused: return zeros for a tensor on which no loss depends, instead of raising.
        retain_graph: keep the graph of the results for another backward pass.

    Returns:
        The results, and for each loss a gradient of every tensor.
    """
    last = _listed(results)
    found = [*last]
    for number, loss in enumerate(losses, 1):
        options = {"create_graph": number < len(losses), "allow_unused": unused, "materialize_grads": unused}
        kept = retain_graph or number < len(losses)
        last = list(torch.autograd.grad(loss(last), wanted, retain_graph=kept, **options))
        found += last
    return found


def check_derivatives(function: Function, *inputs: Tensor, fast: bool = False) -> None:
    """First derivatives, the same first derivatives under ``create_graph=True``, and second ones, batched too.

    Args:
        function: of float64 tensors; the same in every call.
        inputs: which it is differentiated in.
        fast: compare along random directions, and not entry by entry.
    """
    assert gradcheck(function, inputs, check_batched_grad=True, fast_mode=fast)
    # gradgradcheck is content with a wrong first derivative, as long as the second one is consistent with it.
    loss = squares(_listed(function(*inputs)))
    plain = torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True)
    again = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
    torch.testing.assert_close(again, plain, rtol=0, atol=1e-10)
    assert gradgradcheck(function, inputs, check_batched_grad=True, fast_mode=fast)


def check_vectorized(function: Function, *inputs: Tensor) -> None:
    """``vectorize=True`` gives the Jacobian and the Hessian that one gradient after another gives."""
    leaves = tuple(tensor.detach() for tensor in inputs)
    for derivative, of in ((jacobian, function), (hessian, lambda *given: squares(_listed(function(*given))))):
        result, expected = derivative(of, leaves, vectorize=True), derivative(of, leaves)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def batched_and_looped(
    outputs: Outputs, inputs: tuple[Tensor, ...], count: int = 3
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Gradients (count, …) of every input from as many random gradients of the outputs, at once and one by one."""
    outputs = tuple(x for x in ([outputs] if isinstance(outputs, Tensor) else outputs) if x.requires_grad)
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(count, *output.shape, generator=generator).to(output.dtype) for output in outputs]

    def gradients(given: list[Tensor], *, batched: bool) -> tuple[Tensor, ...]:
        options = {"retain_graph": True, "is_grads_batched": batched, "materialize_grads": True}
        return torch.autograd.grad(outputs, inputs, given, **options)

    looped = [gradients([vector[number] for vector in vectors], batched=False) for number in range(count)]
    return gradients(vectors, batched=True), tuple(map(torch.stack, zip(*looped, strict=True)))


def check_batched(outputs: Outputs, inputs: tuple[Tensor, ...], tolerance: float = 1e-5) -> None:
    """``is_grads_batched=True`` gives what one gradient after another gives, to so much of the largest number."""
    for x, y in zip(*batched_and_looped(outputs, inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(1.0, float(y.abs().max())))


def check_module(module: Any, *inputs: Tensor, **call: Any) -> None:
    """Derivatives of a module's inputs and parameters, which drops the same entries in every call.

    In float64 against finite differences, in float32 batched against one by one.
    """

    def function(*leaves: Tensor) -> Any:
        # `gradcheck` changes the parameters in place.
        torch.manual_seed(3)
        given, dtype = leaves[: len(inputs)], leaves[0].dtype
        options = {name: x.to(dtype) if _is_bias(x) else x for name, x in call.items()}
        outputs = module(*given, **options)
        return finite(outputs if isinstance(outputs, Tensor) else tuple(x for x in outputs if x is not None))

    check_derivatives(function, *inputs, *module.double().parameters(), fast=True)
    leaves = (*(x.detach().float().requires_grad_() for x in inputs), *module.float().parameters())
    check_batched(function(*leaves), leaves)


def _is_bias(option: Any) -> bool:
    return isinstance(option, Tensor) and option.is_floating_point()


def _listed(outputs: Outputs) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
