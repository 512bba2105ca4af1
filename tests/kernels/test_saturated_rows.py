"""Gradients of rows in which one weight is nearly 1: they are tiny, and dp − δ of its key is all cancellation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.native import FLOAT_SETS, NativeArguments, plan_of, use_instruction_set

DIM = 67
#: Scores of the heaviest keys; all other scores are at most about half as large.
SCORE = 33.0
on_every_set = pytest.mark.parametrize("kernel", FLOAT_SETS)
on_ours = pytest.mark.parametrize("kernel", ["chunked", *FLOAT_SETS])
#: Rows and keys: one block, several, and so few rows that the keys are split into chunks.
SIZES = pytest.mark.parametrize(("length", "keys"), [(31, 31), (53, 211), (7, 4999)])

Attention = Callable[..., Tensor]


def saturated(length: int, keys: int, kv_heads: int = 2) -> tuple[tuple[Tensor, ...], Tensor]:
    """Query, key and value, and the output's gradient; query i has its largest score with key i · keys / length."""
    torch.manual_seed(length)
    key = torch.nn.functional.normalize(torch.randn(1, kv_heads, keys, DIM), dim=-1)
    heaviest = torch.arange(length) * keys // length
    query = SCORE * DIM**0.5 * key[:, :, heaviest].repeat_interleave(2, 1)
    value = torch.randn(1, kv_heads, keys, DIM)
    return (query, key, value), torch.randn(1, 2 * kv_heads, length, DIM)


def gradients(kernel: str | None, attend: Attention, dtype: torch.dtype, gradient: Tensor, *tensors: Tensor) -> Any:
    """Gradients of copies of the tensors but for the value, on `chunked`, an instruction set or without a choice."""
    inputs = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors]
    native = kernel in FLOAT_SETS
    with (
        use_instruction_set(kernel) if native else nullcontext(),
        clearhead.use_kernel("native" if native else kernel) if kernel else nullcontext(),
    ):
        query, key, _, *others = torch.autograd.grad(attend(*inputs), inputs, gradient.to(dtype))
    return query, key, *others


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((tensor.double() - right).abs().max() / right.abs().max()) for tensor, right in pairs]


@on_ours
@SIZES
def test_gradients_are_as_near_to_float64_as_those_of_sdpa(length: int, keys: int, kernel: str) -> None:
    tensors, gradient = saturated(length, keys)

    def sdpa(*inputs: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=True)

    exact = gradients(None, sdpa, torch.float64, gradient, *tensors)
    assert all(tensor.abs().max() < 1e-3 for tensor in exact)
    allowed = errors(gradients(None, sdpa, torch.float32, gradient, *tensors), exact)
    found = errors(gradients(kernel, clearhead.attention, torch.float32, gradient, *tensors), exact)
    assert all(error <= 1.5 * limit for error, limit in zip(found, allowed, strict=True)), (found, allowed)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "softcap": {"softcap": 40.0},
    "sinks": {"sinks": torch.tensor([20.0, -3.0, 11.0, 17.0])},
    "dropout": {"dropout_p": 0.3},
    "bias": {"bias": True},
    "bias and softcap": {"bias": True, "softcap": 40.0},
}


@on_every_set
@pytest.mark.parametrize("option", OPTIONS)
@SIZES
def test_options_leave_the_native_kernel_exact(length: int, keys: int, option: str, kernel: str) -> None:
    tensors, gradient = saturated(length, keys)
    if "bias" in OPTIONS[option]:
        tensors = (*tensors, torch.randn(1, 4, length, keys))

    def attend(query: Tensor, key: Tensor, value: Tensor, *bias: Tensor) -> Tensor:
        torch.manual_seed(3)
        options = {name: x.to(query.dtype) if isinstance(x, Tensor) else x for name, x in OPTIONS[option].items()}
        if options.pop("bias", False):
            options["mask"] = masks.bias(*bias)
        return clearhead.attention(query, key, value, **options)

    exact = gradients("chunked", attend, torch.float64, gradient, *tensors)
    found = errors(gradients(kernel, attend, torch.float32, gradient, *tensors), exact)
    assert max(found) <= 1e-4, found


@on_ours
@pytest.mark.parametrize("poisoned", [False, True])
def test_a_row_of_one_key_has_no_gradient_but_for_nan(poisoned: bool, kernel: str) -> None:
    tensors, gradient = saturated(1, 1)
    if poisoned:
        gradient[0, 0, 0, 5] = float("nan")
    found = gradients(kernel, clearhead.attention, torch.float32, gradient, *tensors)
    assert all(tensor.isnan().any() if poisoned else not tensor.any() for tensor in found)


@on_every_set
def test_some_keys_of_a_larger_call_add_up(kernel: str) -> None:
    """Σ ds over some of the keys is not known: no gradient may be taken from those of the other keys."""
    (query, key, value), gradient = saturated(53, 211)
    query = query / 5  # so that the largest weights are between one half and 1

    with use_instruction_set(kernel):
        arguments = NativeArguments(query, key, value, scale=DIM**-0.5)
        plan = plan_of(arguments, differentiable=True)
        lse = plan.empty_lse(query)
        output = plan.forward(arguments, lse)
        shards = []
        for some in (slice(0, 101), slice(101, 211)):
            shard = arguments._replace(key=key[:, :, some].contiguous(), value=value[:, :, some].contiguous())
            plan = plan_of(shard, differentiable=True)
            shards.append(plan.backward(shard, output, lse, gradient, whole_rows=False)[:3])
    first, second = shards
    found = (first[0] + second[0], torch.cat([first[1], second[1]], 2))
    exact = gradients("chunked", clearhead.attention, torch.float64, gradient, query, key, value)
    assert max(errors(found, exact)) <= 1e-5
