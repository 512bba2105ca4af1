"""Backward passes that PyTorch cannot follow: those of fused kernels and of our own autograd functions.

Under ``create_graph=True`` gradients are computed by `reference` instead, by PyTorch's operations. So are gradients
that are mapped over (``is_grads_batched=True``, ``jacobian(vectorize=True)``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import Call, Results, zero_hidden
from .._call.heads import merge_heads
from .._call.packed import as_one_sequence, each_sequence
from .._torch_private import any_autocast, is_batched
from ..errors import KernelError
from ._base import of_rows
from ._reference import reference_results

OptionalTensors = Sequence[Tensor | None]
#: Results from inputs, by PyTorch's operations.
Recompute = Callable[..., OptionalTensors]
#: The inputs of a function, and the function.
Differentiable = tuple[OptionalTensors, Recompute]


def allow_second_derivatives(kernel_name: str, call: Call, results: Results) -> Results:
    """The same results, differentiable twice in the call's inputs."""
    output, lse, weights = results
    tensors = (output,) if lse is None else (output, lse)
    same: Any = _Identity.apply(kernel_name, call, len(tensors), *tensors, *call.inputs)
    return Results(same[0], None if lse is None else same[1], weights)


def sinks_gradient(sinks: Tensor, correction: Tensor, lse: Tensor) -> Tensor:
    """A sink is one more key whose value is zero: ds = −p_sink · (δ − dl), summed over the rows that share it."""
    sinks_of_rows = of_rows(sinks).to(lse.dtype)
    gradient = -((sinks_of_rows - lse).exp() * correction)  # (B, H, L)
    return gradient.sum_to_size(sinks_of_rows.shape).view(sinks.shape).to(sinks.dtype)


class _Identity(torch.autograd.Function):
    """Results of a kernel of PyTorch's, whose backward maps over gradients but is not differentiable."""

    @staticmethod
    def forward(ctx: Any, kernel_name: str, call: Call, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        read_again = call.read_again
        ctx.kernel_name = kernel_name
        ctx.rebuild, ctx.draws_dropout = call.rebuild(read_again), call.layout.dropout_p > 0 and call.seed is None
        ctx.inputs = len(tensors) - count
        ctx.save_for_backward(*tensors[count:], *read_again)
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, None, None, *gradients, *(None,) * ctx.inputs)
        if ctx.draws_dropout:
            raise KernelError(
                f"create_graph=True: {ctx.kernel_name} drew its own dropout, which cannot be drawn again. "
                "Run the forward pass under clearhead.use_kernel('chunked') or with dropout off."
            )
        of_inputs = gradients_through(*by_reference(ctx.rebuild(*ctx.saved_tensors)), gradients)
        return (None,) * (3 + len(gradients)) + of_inputs


def without_second_derivatives(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The inputs of an operator whose backward pass runs even where `_Identity` has computed all gradients."""
    return cast("tuple[Tensor, ...]", _NoGraph.apply(*tensors))


class _NoGraph(torch.autograd.Function):
    """Inputs that get no gradient under ``create_graph=True``, where it would be zero and could not be derived."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None,) * len(gradients) if torch.is_grad_enabled() else gradients


def backward_pass(
    ctx: Any,
    gradients: OptionalTensors,
    restore: Callable[[], Call],
    fused: Callable[[Call], OptionalTensors],
    by_operations: Callable[[Call], Differentiable],
) -> tuple[Tensor | None, ...]:
    """The backward pass of an autograd function of ours, whose tensor arguments come last.

    Args:
        ctx: context of the function.
        gradients: gradients of its results.
        restore: makes its call of what was saved.
        fused: computes the gradients of its tensor arguments without a graph.
        by_operations: the tensor arguments of a call, and a function that computes the results from them by PyTorch's
            operations.
    """
    defined = [gradient for gradient in gradients if gradient is not None]
    arguments = len(ctx.needs_input_grad)
    if not defined:  # `_Identity` has computed all gradients
        return (None,) * arguments
    call = restore()
    # Only PyTorch's operations can be differentiated again, or mapped over.
    if torch.is_grad_enabled() or any(map(is_batched, defined)):
        of_inputs = gradients_through(*by_operations(call), gradients)
    elif any_autocast():
        with torch.autocast(defined[0].device.type, enabled=False):
            of_inputs = fused(call)
    else:
        of_inputs = fused(call)
    return *(None,) * (arguments - len(of_inputs)), *of_inputs


def gradients_through(
    inputs: OptionalTensors, recompute: Recompute, gradients: OptionalTensors
) -> tuple[Tensor | None, ...]:
    """Gradients of `inputs` from the gradients of `recompute(*inputs)`, by PyTorch's operations.

    Results without a gradient are ignored. Inputs that need no gradient get ``None``.
    """
    create_graph = torch.is_grad_enabled()
    device = next(tensor.device.type for tensor in inputs if tensor is not None)
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # A tensor that is two of the inputs has two gradients here.
        views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        wanted = [view for view in views if view is not None and view.requires_grad]
        outputs: list[Tensor] = []
        of_outputs: list[Tensor] = []
        for result, gradient in zip(recompute(*views), gradients, strict=False):
            # The log-sum-exp has no gradient if only the value needs one.
            if result is not None and gradient is not None and result.requires_grad:
                outputs.append(result)
                of_outputs.append(gradient)
        if not outputs:
            return (None,) * len(views)
        of_wanted = iter(torch.autograd.grad(outputs, wanted, of_outputs, create_graph=create_graph, allow_unused=True))
    return tuple(next(of_wanted) if view is not None and view.requires_grad else None for view in views)


def by_reference(call: Call) -> Differentiable:
    """The inputs of a call, and a function from them to output and lse."""
    rebuild = call.rebuild()

    def recompute(*inputs: Tensor) -> OptionalTensors:
        again = rebuild(*inputs)
        output, lse = reference_of(again.split())
        return output if again.heads is None or output is None else merge_heads(output), lse

    return call.inputs, recompute


def reference_of(call: Call) -> OptionalTensors:
    """Output and lse of a call, by PyTorch's operations."""
    call.layout_, call.lse = call.layout._replace(lse=True), True
    if call.sequences is None or call.seed is None:
        return reference_results(zero_hidden(as_one_sequence(call)))[:2]
    results = [reference_results(zero_hidden(sequence))[:2] for sequence in each_sequence(call)]
    return [torch.cat(cast("tuple[Tensor, ...]", tensors), 2) for tensors in zip(*results, strict=True)]
