"""How far a kernel's results and gradients of a small call are from `reference`'s."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .._call.call import Call, valid_call
from .._environment import autocast_off
from ..masks._base import Mask
from ._base import Kernel
from ._reference import ReferenceKernel

#: Batch size, heads, queries and keys, and head size.
SHAPE = 2, 2, 300, 64
#: The largest error of a result or gradient, relative to the largest number, that half precision explains.
_TOLERANCE = 5e-2


def problem_of(error: float) -> str | None:
    """What a `FirstCheck` says of this error, or ``None``."""
    return None if error <= _TOLERANCE else f"its numbers are wrong by {error:.2g}"


def largest_error(
    kernel: Kernel,
    mask: Mask | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    lse: bool = False,
    sinks: bool = False,
) -> float:
    """The largest error of results and gradients, relative to the largest number of each; infinite for NaN.

    Args:
        kernel: it runs the call, whether or not it would be chosen.
        mask: on `SHAPE`, on the device.
        device, dtype: of the call.
        lse: whether the log-sum-exp is one of the results.
        sinks: whether there are sinks.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SHAPE, generator=generator).to(device, dtype) for _ in range(4)]
    if sinks:
        inputs.append(torch.randn(SHAPE[1], generator=generator).to(device))
    with torch.inference_mode(False), torch.enable_grad(), autocast_off(inputs[0]):
        results = _results(kernel, mask, inputs, lse)
        expected = _results(ReferenceKernel(), mask, [each.double() for each in inputs], lse)
    errors = [((a.double() - b).abs().amax() / b.abs().amax()) for a, b in zip(results, expected, strict=True)]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).amax())


def _results(kernel: Kernel, mask: Mask | None, inputs: list[Tensor], lse: bool) -> list[Tensor]:
    """The output, with `lse` the log-sum-exp, and the gradients of query, key, value, sinks and biases that learn."""
    query, key, value, gradient, *sinks = inputs
    query, key, value, *sinks = leaves = [each.clone().requires_grad_() for each in (query, key, value, *sinks)]
    call = valid_call(Call(query, key, value, mask, sinks=sinks[0] if sinks else None, lse=lse))
    computed = kernel.plan(call.layout, call.bound)(call)
    outputs, gradients = [computed.output], [gradient]
    if lse:
        outputs.append(cast(Tensor, computed.lse))
        gradients.append(gradient[..., 0].to(outputs[1].dtype))
    leaves += [bias for bias in call.bias_tensors if bias.requires_grad]
    return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, gradients)]
