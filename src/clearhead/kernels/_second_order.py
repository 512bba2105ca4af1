"""Backward passes that PyTorch cannot follow: those of fused kernels and of our own autograd functions.

Under ``create_graph=True``, and where many gradients are mapped over at once (``is_grads_batched=True``,
``jacobian(vectorize=True)``), gradients are computed by `reference` instead, from PyTorch's operations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import AttentionCall, Results, zero_hidden
from .._call.packed import as_one_sequence, each_sequence
from .._torch_private import any_autocast, is_batched
from ..errors import KernelError
from ._reference import reference_results

OptionalTensors = Sequence[Tensor | None]
#: Results from inputs, by PyTorch's operations.
Recompute = Callable[..., OptionalTensors]


def allow_second_derivatives(kernel_name: str, call: AttentionCall, results: Results) -> Results:
    """The same results, differentiable twice in the call's inputs."""
    output, lse, weights = results
    if lse is None:
        return Results(cast(Tensor, _Identity.apply(kernel_name, call, 1, output, *call.inputs)), None, weights)
    output, lse = cast("tuple[Tensor, Tensor]", _Identity.apply(kernel_name, call, 2, output, lse, *call.inputs))
    return Results(output, lse, weights)


def sinks_gradient(sinks: Tensor, correction: Tensor, lse: Tensor) -> Tensor:
    """A sink is one more key whose value is zero: ds = −p_sink · (δ − dl), summed over batch and rows."""
    p_sink = (sinks.to(lse.dtype)[None, :, None] - lse).exp()  # (B, H, L)
    return -(p_sink * correction).sum((0, 2)).to(sinks.dtype)


class _Identity(torch.autograd.Function):
    """Results of a kernel of PyTorch's, whose backward maps over gradients but is not differentiable."""

    @staticmethod
    def forward(ctx: Any, kernel_name: str, call: AttentionCall, count: int, *tensors: Tensor) -> Any:
        ctx.kernel_name = kernel_name
        ctx.rebuild, ctx.draws_dropout = call.rebuild, call.spec.dropout_p > 0 and call.request.seed is None
        ctx.inputs = len(tensors) - count
        ctx.save_for_backward(*tensors[count:], *call.read_again)
        results = tuple(tensor.view_as(tensor) for tensor in tensors[:count])
        return results[0] if count == 1 else results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, None, None, *gradients, *(None,) * ctx.inputs)
        if ctx.draws_dropout:
            raise KernelError(
                f"create_graph=True: {ctx.kernel_name} drew its own dropout, which cannot be drawn again. "
                "Run the forward pass under clearhead.use_kernel('chunked') or with dropout off."
            )
        inputs = ctx.saved_tensors[: ctx.inputs]
        found = gradients_through(recompute_by_reference(ctx.rebuild), inputs, gradients)
        return (None,) * (3 + len(gradients)) + found


def backward_pass(
    ctx: Any,
    gradients: OptionalTensors,
    inputs: OptionalTensors,
    own: Callable[[], OptionalTensors],
    recompute: Recompute,
) -> tuple[Tensor | None, ...]:
    """The backward pass of an autograd function of ours, whose tensor arguments come last.

    Args:
        ctx: of the function.
        gradients: of its results.
        inputs: its tensor arguments.
        own: their gradients by the function's own means, which are neither differentiable nor mapped over.
        recompute: the function's results from its tensor arguments.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    arguments = len(ctx.needs_input_grad)
    if not given:  # `_Identity` has computed them all
        return (None,) * arguments
    # To be differentiated again, or mapped over, a backward pass has to be made of PyTorch's operations.
    if torch.is_grad_enabled() or any(map(is_batched, given)):
        found = gradients_through(recompute, inputs, gradients)
    elif any_autocast():
        with torch.autocast(given[0].device.type, enabled=False):
            found = own()
    else:
        found = own()
    return *(None,) * (arguments - len(found)), *found


def gradients_through(
    recompute: Recompute, inputs: OptionalTensors, gradients: OptionalTensors
) -> tuple[Tensor | None, ...]:
    """Gradients of `inputs` from those of what `recompute` makes of them, by PyTorch's operations.

    Results beyond the gradients that are given take no part. Inputs that need no gradient get ``None``.
    """
    again = torch.is_grad_enabled()
    device = next(tensor.device.type for tensor in inputs if tensor is not None)
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # A tensor that is two of the inputs has two gradients here.
        views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        wanted = [view for view in views if view is not None and view.requires_grad]
        outputs: list[Tensor] = []
        given: list[Tensor] = []
        for result, gradient in zip(recompute(*views), gradients, strict=False):
            # The log-sum-exp has no gradient where the value alone needs one.
            if result is not None and gradient is not None and result.requires_grad:
                outputs.append(result)
                given.append(gradient)
        if not outputs:
            return (None,) * len(views)
        found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=again, allow_unused=True))
    return tuple(next(found) if view is not None and view.requires_grad else None for view in views)


def recompute_by_reference(rebuild: Callable[..., AttentionCall]) -> Recompute:
    """Output and lse of a call of other inputs; see `AttentionCall.rebuild`."""

    def recompute(*inputs: Tensor) -> OptionalTensors:
        call = rebuild(*inputs).wanting(lse=True)
        if call.request.sequences is None or call.request.seed is None:
            return reference_results(zero_hidden(as_one_sequence(call)))[:2]
        found = [reference_results(zero_hidden(sequence))[:2] for sequence in each_sequence(call)]
        return [torch.cat(cast("tuple[Tensor, ...]", parts), 2) for parts in zip(*found, strict=True)]

    return recompute
