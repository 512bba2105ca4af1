"""Derivatives of `attention` over its options: first, second and many at once (``is_grads_batched=True``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.kernels._sdpa import SdpaKernel
from tests.support.budgets import in_turn
from tests.support.derivatives import (
    batched_and_looped,
    check_batched,
    check_derivatives,
    check_vectorized,
    finite,
    random,
)

from .derivative_cases import MASKS, OPTIONS, B, D, Dv, H, L, S, attend

OF_ATTENTION_ALONE = ("dropout", "lse", "lse, fully masked rows", "sinks, fully masked rows", "everything")
#: Options of `attention_weights` too.
OF_WEIGHTS = [name for name in OPTIONS if name not in OF_ATTENTION_ALONE]
KERNELS = ("chosen", "chunked", "reference")
X = torch.randn(1, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def inputs(name: str, dtype: torch.dtype = torch.float64, kv_heads: int = 1) -> tuple[Tensor, ...]:
    shapes = ((B, H, L, D), (B, kv_heads, S, D), (B, kv_heads, S, Dv), *OPTIONS[name].shapes)
    return tuple(random(*shape).detach().to(dtype).requires_grad_() for shape in shapes)


@in_turn({"name": OPTIONS}, {"kernel": KERNELS}, indirect=["kernel"])
@pytest.mark.usefixtures("kernel")
def test_float64(name: str) -> None:
    check_derivatives(lambda *given: finite(attend(name, *given)), *inputs(name), fast=True)


@pytest.mark.parametrize(
    "name", [name for name in MASKS if name not in ("keep per head", "where", "ALiBi", "combined")]
)
def test_float64_on_pytorchs_kernel(name: str) -> None:
    query, key, _ = inputs(name, kv_heads=H)
    with clearhead.use_kernel("sdpa"):
        check_derivatives(lambda *given: attend(name, *given), query, key, random(B, H, S, D), fast=True)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("with_weights", [False, True])
def test_vectorized_jacobian_and_hessian(with_weights: bool) -> None:
    def function(query: Tensor, key: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        mask = masks.bias(bias) & masks.causal()
        options = {"mask": mask, "sinks": sinks, "softcap": 1.5}
        output, lse = clearhead.attention(query, key, key, **options, dropout_p=0.3, return_lse=True)
        return (output, lse, clearhead.attention_weights(query, key, **options)) if with_weights else (output, lse)

    check_vectorized(function, random(1, 2, 3, 2), random(1, 1, 5, 2), random(3, 5), random(2))


@in_turn({"name": OPTIONS}, {"kernel": KERNELS}, always=1, indirect=["kernel"])
@pytest.mark.usefixtures("kernel")
def test_float32_as_one_by_one(name: str) -> None:
    """On `native` where it was built and does not refuse."""
    given = inputs(name, torch.float32)
    check_batched(attend(name, *given), given)


@pytest.mark.parametrize("name", ["causal", "bias (1, H, L, S)", "sinks, fully masked rows", "everything"])
@pytest.mark.usefixtures("kernel")
def test_bfloat16(name: str) -> None:
    """Errors against float64 are at most twice those of `reference` with one gradient after another."""
    given = inputs(name, torch.bfloat16)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    with clearhead.use_kernel("reference"):
        _, reference = batched_and_looped(attend(name, *given), given)
        _, expected = batched_and_looped(attend(name, *exact), exact)
    found, looped = batched_and_looped(attend(name, *given), given)
    for of_reference, right, *gradients in zip(reference, expected, found, looped, strict=True):
        rounding = torch.finfo(torch.bfloat16).eps * float(right.abs().max())
        for gradient in gradients:
            assert gradient.dtype == torch.bfloat16
            error, allowed = ((x.double() - right).abs().max() for x in (gradient, of_reference))
            assert error <= max(2 * allowed, rounding), f"{name}: {error:.3g}, reference {allowed:.3g}"


@in_turn({"name": OF_WEIGHTS}, {"average": [False, True]})
def test_weights(name: str, average: bool) -> None:
    """Of chosen rows, one of them twice; averaged, of all."""
    query, key, _, *rest = inputs(name)
    rows = None if average else [4, 0, 4]

    def function(query: Tensor, key: Tensor, *rest: Tensor) -> Tensor:
        arguments = OPTIONS[name].arguments(*rest)
        return clearhead.attention_weights(query, key, queries=rows, average_attn_weights=average, **arguments)

    check_derivatives(function, query, key, *rest, fast=True)
    single = tuple(tensor.detach().float().requires_grad_() for tensor in (query, key, *rest))
    torch.testing.assert_close(*batched_and_looped(function(*single), single), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("kernel")
def test_mapped_by_torch_func() -> None:
    """`torch.vmap` over a backward pass whose forward pass ran outside of it."""
    given = inputs("everything")
    output, lse = attend("everything", *given)
    expected = batched_and_looped((output, lse), given)[1]
    generator = torch.Generator().manual_seed(1)
    vectors = tuple(torch.randn(3, *x.shape, generator=generator).to(x.dtype) for x in (output, lse))

    def gradients(*of_results: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((output, lse), given, of_results, retain_graph=True)

    torch.testing.assert_close(torch.vmap(gradients)(*vectors), expected, rtol=0, atol=1e-10)


# A bias that the query, key or value is made from gets its own gradient and theirs.
SHARED: dict[str, tuple[Callable[[Tensor], Tensor | tuple[Tensor, ...]], tuple[int, ...]]] = {
    "one bias twice": (lambda bias: clearhead.attention(X, X, X, masks.bias(bias) & masks.bias(bias)), (3, 3)),
    "key and bias": (lambda x: clearhead.attention(X, x, X, masks.bias(x)), (1, 2, 3, 3)),
    "query made from the bias": (lambda bias: clearhead.attention(X + bias, X, X, masks.bias(bias)), (3, 3)),
    "weights of one tensor": (lambda x: clearhead.attention_weights(x, x, masks.causal()), (1, 2, 3, 2)),
    "weights of a query made from the bias": (
        lambda bias: clearhead.attention_weights(X + bias, X, masks.bias(bias)),
        (3, 3),
    ),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", SHARED)
def test_one_tensor_in_two_places(name: str) -> None:
    function, shape = SHARED[name]
    check_derivatives(function, random(*shape))


def test_create_graph_with_a_dropout_that_cannot_be_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's CPU kernels have no dropout, so one that has is pretended."""
    monkeypatch.setattr(SdpaKernel, "refusals", lambda self, spec, mask, grid: ())
    x = random(1, 2, 3, 2)
    with clearhead.use_kernel("sdpa"):
        output = clearhead.attention(x, x, x, dropout_p=0.5)
    with pytest.raises(clearhead.errors.KernelError, match=r"create_graph=True: sdpa drew its own dropout"):
        torch.autograd.grad(output.sum(), x, create_graph=True)
