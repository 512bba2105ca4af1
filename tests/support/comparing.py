"""Running one call with its gradients, and the tolerances the design fixes for the results."""

from __future__ import annotations

import torch
from torch import Tensor

import clearhead

from .calls import Call
from .closeness import TOLERANCES
from .oracle import gradients, solve

KERNELS = ("sdpa", "chunked", "reference")

Numbers = dict[str, Tensor]
_GRADIENT = "gradient of "


def kernel_numbers(call: Call, kernel: str) -> Numbers:
    """Output, lse if the call asks for it, and the gradient of every input, from one forced kernel."""
    with clearhead.use_kernel(kernel):
        result = clearhead.attention(*call.attention_arguments, **call.options)
    output, lse = result if call.options["return_lse"] else (result, None)
    wanted = {_GRADIENT + name: x for name, x in call.named_inputs.items() if x.requires_grad}
    assert output.dtype == call.query.dtype
    assert lse is None or lse.dtype == (torch.float64 if call.query.dtype == torch.float64 else torch.float32)
    outputs = [output] if lse is None else [output, lse]
    upstream = [gradient.to(tensor.dtype) for gradient, tensor in zip(_upstream(call), outputs, strict=False)]
    gradients = torch.autograd.grad(outputs, list(wanted.values()), upstream, materialize_grads=True)
    numbers = {"output": output.detach()} | ({} if lse is None else {"lse": lse.detach()})
    return numbers | dict(zip(wanted, gradients, strict=True))


def eval_output(call: Call, kernel: str) -> Tensor:
    """The output as inference computes it, with nothing recorded."""
    with clearhead.use_kernel(kernel), torch.no_grad():
        result = clearhead.attention(*call.attention_arguments, **call.options)
    return result[0] if call.options["return_lse"] else result


def expected_numbers(call: Call) -> Numbers:
    """The same from the oracle, in float64."""
    answer = solve(call.problem)
    output_gradient, lse_gradient = _upstream(call)
    result = gradients(answer, output_gradient, lse_gradient if call.options["return_lse"] else None)
    numbers = {"output": answer.output.detach()}
    if call.options["return_lse"]:
        numbers["lse"] = answer.lse.detach()
    for (name, tensor), gradient in zip(call.named_inputs.items(), result, strict=True):
        if tensor.requires_grad:
            numbers[_GRADIENT + name] = gradient
    return numbers


def require_half_as_good(found: Numbers, reference: Numbers, expected: Numbers, dtype: torch.dtype) -> None:
    """Error against float64 at most twice that of `reference` in the same dtype."""
    assert found.keys() == expected.keys()
    errors, reference_errors = _errors(found, expected), _errors(reference, expected)
    # Sums that cancel to nothing are float32's rounding noise, in reference as well, which may hit zero by luck.
    noise = TOLERANCES[torch.float32] * max(1.0, *(_largest(tensor) for tensor in expected.values()))
    for name, error in errors.items():
        # Reference may also hit numbers that the dtype holds exactly; rounding to the dtype is granted to everyone.
        rounding = torch.finfo(dtype).eps / 2 * _largest(expected[name])
        limit = max(2 * reference_errors[name], 2 * rounding, noise)
        assert error <= limit, f"{name}: off by {error:.3g}, reference by {reference_errors[name]:.3g}"


def _upstream(call: Call) -> tuple[Tensor, Tensor]:
    """Gradients that arrive at the output and at lse, exact in every dtype."""
    generator = torch.Generator().manual_seed(1)
    *shape, _ = call.query.shape
    sizes = (*shape, call.value.shape[-1])
    output, lse = (torch.randint(-8, 9, size, generator=generator) / 4 for size in (sizes, tuple(shape)))
    return output, lse


def _errors(found: Numbers, expected: Numbers) -> dict[str, float]:
    return {name: _error(name, tensor, expected[name]) for name, tensor in found.items()}


def _error(name: str, found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    infinite = expected.isinf()
    assert torch.equal(found.double()[infinite], expected[infinite]), f"{name}: infinities differ"
    difference = (found.double() - expected)[~infinite].abs()
    assert difference.isfinite().all(), f"{name}: {int((~difference.isfinite()).sum())} numbers are not finite"
    return float(difference.max()) if difference.numel() else 0.0


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
