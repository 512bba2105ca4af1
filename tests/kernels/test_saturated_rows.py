"""Gradients of rows in which one weight is nearly 1: they are tiny, and dp − δ of its key is all cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._native import instruction_sets, use_instruction_set
from clearhead.kernels._native_arguments import NativeArguments
from clearhead.kernels._native_plan import plan_of

DIM = 67
#: Scores of the heaviest keys; all other scores are at most about half as large.
SCORE = 33.0
KERNELS = ["chunked", *instruction_sets()]
#: Rows and keys: one block, several, and so few rows that the keys are split into parts.
SIZES = [(31, 31), (53, 211), (7, 4999)]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def saturated(length: int, keys: int, kv_heads: int = 2) -> tuple[tuple[Tensor, ...], Tensor]:
    """Query, key and value; query i has its largest score with key i · keys / length."""
    torch.manual_seed(length)
    key = torch.nn.functional.normalize(torch.randn(1, kv_heads, keys, DIM), dim=-1)
    heaviest = torch.arange(length) * keys // length
    query = SCORE * DIM**0.5 * key[:, :, heaviest].repeat_interleave(2, 1)
    value = torch.randn(1, kv_heads, keys, DIM)
    return (query, key, value), torch.randn(1, 2 * kv_heads, length, DIM)


def gradients(attend: Attention, tensors: tuple[Tensor, ...], gradient: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query and key, and of `more` tensors that `attend` reads."""
    wanted = [tensor.requires_grad_() for tensor in (*tensors, *more)]
    query, key, _, *rest = torch.autograd.grad(attend(*wanted[:3]), wanted, gradient)
    return query, key, *rest


def on(kernel: str, attend: Attention) -> Attention:
    """The same attention on `chunked`, or on the native kernel with an instruction set."""

    def forced(*tensors: Tensor) -> Tensor:
        if kernel == "chunked":
            with clearhead.use_kernel(kernel):
                return attend(*tensors)
        with clearhead.use_kernel("native"):
            return attend(*tensors)

    return forced


def copies(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().to(dtype, copy=True) for tensor in tensors)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs]


def kernel_gradients(kernel: str, attend: Attention, *arguments: Any) -> tuple[Tensor, ...]:
    if kernel == "chunked":
        return gradients(on(kernel, attend), *arguments)
    with use_instruction_set(kernel):
        return gradients(on(kernel, attend), *arguments)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("length", "keys"), SIZES)
def test_gradients_are_as_near_to_float64_as_those_of_sdpa(length: int, keys: int, kernel: str) -> None:
    tensors, gradient = saturated(length, keys)

    def sdpa(*three: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*three, enable_gqa=True)

    exact = gradients(sdpa, copies(tensors, torch.float64), gradient.double())
    assert all(tensor.abs().max() < 1e-3 for tensor in exact)
    allowed = errors(gradients(sdpa, copies(tensors, torch.float32), gradient), exact)
    found = errors(kernel_gradients(kernel, clearhead.attention, copies(tensors, torch.float32), gradient), exact)
    assert all(one <= 1.5 * other for one, other in zip(found, allowed, strict=True)), (found, allowed)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "softcap": {"softcap": 40.0},
    "sinks": {"sinks": torch.tensor([20.0, -3.0, 11.0, 17.0])},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("kernel", instruction_sets())
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("length", "keys"), [(31, 31), (53, 211), (7, 4999)])
def test_options_leave_the_native_kernel_exact(length: int, keys: int, option: str, kernel: str) -> None:
    tensors, gradient = saturated(length, keys)

    def attend(*three: Tensor) -> Tensor:
        torch.manual_seed(3)
        options = {name: x.to(three[0].dtype) if isinstance(x, Tensor) else x for name, x in OPTIONS[option].items()}
        return clearhead.attention(*three, **options)

    exact = gradients(on("chunked", attend), copies(tensors, torch.float64), gradient.double())
    found = errors(kernel_gradients(kernel, attend, copies(tensors, torch.float32), gradient), exact)
    assert max(found) <= 1e-4, found


@pytest.mark.parametrize("kernel", instruction_sets())
@pytest.mark.parametrize("softcap", [None, 40.0])
def test_a_bias_that_learns(softcap: float | None, kernel: str) -> None:
    tensors, gradient = saturated(53, 211)
    bias = torch.randn(1, 4, 53, 211)

    def results(kernel: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        (of_dtype,) = copies((bias,), dtype)

        def attend(*three: Tensor) -> Tensor:
            return clearhead.attention(*three, mask=masks.bias(of_dtype), softcap=softcap)

        return kernel_gradients(kernel, attend, copies(tensors, dtype), gradient.to(dtype), of_dtype)

    found = errors(results(kernel, torch.float32), results("chunked", torch.float64))
    assert max(found) <= 1e-4, found


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_of_one_key_has_no_gradient(kernel: str) -> None:
    tensors, gradient = saturated(1, 1)
    assert all(not tensor.any() for tensor in kernel_gradients(kernel, clearhead.attention, tensors, gradient))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_in_the_gradient_of_a_heavy_row_is_not_lost(kernel: str) -> None:
    tensors, gradient = saturated(1, 1)
    gradient[0, 0, 0, 5] = float("nan")
    assert all(tensor.isnan().any() for tensor in kernel_gradients(kernel, clearhead.attention, tensors, gradient))


@pytest.mark.parametrize("isa", instruction_sets())
def test_some_keys_of_a_larger_call_add_up(isa: str) -> None:
    """Σ ds over some of the keys is not known: no gradient may be taken from those of the other keys."""
    (query, key, value), gradient = saturated(53, 211)
    query = query / 5  # so that the largest weights are between one half and 1

    with use_instruction_set(isa):
        whole = NativeArguments(query, key, value, scale=DIM**-0.5)
        plan = plan_of(whole, differentiable=True)
        lse = plan.empty_lse(query)
        output = plan.forward(whole, lse)
        parts = []
        for some in (slice(0, 101), slice(101, 211)):
            three = (query, key[:, :, some].contiguous(), value[:, :, some].contiguous())
            part = NativeArguments(*three, scale=DIM**-0.5)
            parts.append(plan_of(part, differentiable=True).backward(part, output, lse, gradient, whole_rows=False)[:3])
    found = (parts[0][0] + parts[1][0], *(torch.cat([one[n], other[n]], 2) for n in (1, 2) for one, other in [parts]))
    tensors = copies((query, key, value), torch.float64)
    wanted = [tensor.requires_grad_() for tensor in tensors]
    exact = torch.autograd.grad(on("chunked", clearhead.attention)(*wanted), wanted, gradient.double())
    assert max(errors(found, exact)) <= 1e-5
