"""Second derivatives for fused kernels, whose backward PyTorch cannot differentiate.

The kernel's output passes through an identity that also knows the inputs. An ordinary backward pass goes straight on
to the kernel's own; under ``create_graph=True`` the gradients are computed by `reference` instead, which can be
differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..call import AttentionCall
from ..errors import KernelError
from .reference import ReferenceKernel

__all__ = ["allow_second_derivatives", "asks_for_reference", "gradients_of", "reference_gradients"]


def allow_second_derivatives(
    kernel_name: str,
    call: AttentionCall,
    output: Tensor,
    lse: Tensor | None,
    inputs: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the same output and lse, differentiable twice in the call's inputs, or in those that are given."""
    if inputs is None:
        call, inputs = call.without_tensors(), call.inputs
    if lse is None:
        return cast(Tensor, _Identity.apply(kernel_name, call, 1, output, *inputs)), None
    return cast("tuple[Tensor, Tensor]", _Identity.apply(kernel_name, call, 2, output, lse, *inputs))


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel_name: str, call: AttentionCall, count: int, *tensors: Tensor) -> Any:
        ctx.kernel_name = kernel_name
        ctx.call = call
        ctx.count = count
        ctx.save_for_backward(*tensors[count:])
        results = tuple(tensor.view_as(tensor) for tensor in tensors[:count])
        return results[0] if count == 1 else results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, None, None, *gradients, *(None for _ in ctx.saved_tensors))
        if ctx.call.dropout_p > 0 and ctx.call.dropout_seed is None:
            raise KernelError(
                f"create_graph=True: {ctx.kernel_name} drew its own dropout, which cannot be drawn again. "
                "Run the forward pass under clearhead.use_kernel('chunked') or with dropout off."
            )
        found = reference_gradients(ctx.call, ctx.saved_tensors, gradients)
        return (None, None, None, *(None for _ in gradients), *found)


def asks_for_reference(gradient: Tensor) -> bool:
    """Whether a backward pass has to be made of PyTorch's operations: to be differentiated again, or mapped over."""
    inner: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return (
        torch.is_grad_enabled()
        or inner._are_functorch_transforms_active()
        or inner._functorch.is_legacy_batchedtensor(gradient)  # of ``is_grads_batched=True``
    )


def reference_gradients(
    template: AttentionCall, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of a call's inputs that can be differentiated again, from those of its output and, if given, lse."""
    with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        views = [tensor.view_as(tensor) for tensor in inputs]
        results = ReferenceKernel().run(replace(template.with_tensors(*views), return_lse=True))
        pairs = zip(results, gradients, strict=False)
        taken = [(result, given) for result, given in pairs if result is not None and given is not None]
        return gradients_of([result for result, _ in taken], views, [given for _, given in taken])


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, ``None`` for inputs that need none."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)
