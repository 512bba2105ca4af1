"""Derivatives of `attention` over its options: first, second and many at once (``is_grads_batched=True``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.positions import ALiBi, RelativeBias
from tests.support.attending import attend
from tests.support.budgets import in_turn
from tests.support.closeness import TOLERANCES
from tests.support.derivatives import (
    batched_and_looped,
    check_batched,
    check_derivatives,
    check_vectorized,
    finite,
    random,
)

B, H, L, S, D, Dv = 2, 3, 5, 7, 11, 13

#: A batch item without keys and, in the other, queries that see none.
BLIND = masks.keep(keys=torch.tensor([[0, 1, 1, 0, 1, 1, 1], [0] * S])) & masks.causal()
FIXED = masks.bias(torch.linspace(-1, 1, L * S, dtype=torch.float64).view(L, S))
DOCUMENTS = masks.documents(torch.tensor([0, 0, 1, 1, 2, 2, 2]))

#: Masks without parameters.
MASKS: dict[str, masks.Mask | Tensor | None] = {
    "no mask": None,
    "bool tensor": torch.arange(L * S).view(L, S) % 3 > 0,
    "causal": masks.causal(),
    "keep per head": masks.keep(torch.arange(H * L * S).view(1, H, L, S) % 5 > 1),
    "length of 0": masks.lengths(torch.tensor([4, 0])),
    "where": masks.mask_mod(lambda b, h, q, k: (q + k + h) % 2 == 0),
    "fixed bias": FIXED,
    "ALiBi": ALiBi(H),
    "combined": FIXED & masks.causal("bottom_right") & masks.lengths(torch.tensor([6, 3])) & ALiBi(H),
    "fully masked rows": BLIND,
}


@dataclass(frozen=True)
class Option:
    """Arguments of `attention` made from further tensors of these shapes."""

    arguments: Callable[..., dict[str, Any]]
    shapes: tuple[tuple[int, ...], ...] = ()


def _biased(*shape: int) -> Option:
    return Option(lambda bias: {"mask": masks.bias(bias)}, (shape,))


def _relative(weight: Tensor) -> dict[str, Any]:
    return {"mask": RelativeBias(H, 4, 5).with_bias_tensors(iter([weight]))}


def _everything(bias: Tensor, sinks: Tensor) -> dict[str, Any]:
    mask = masks.bias(bias) & BLIND
    return {"mask": mask, "sinks": sinks, "softcap": 1.5, "scale": 0.7, "dropout_p": 0.3, "return_lse": True}


OPTIONS: dict[str, Option] = {
    **{name: Option(lambda mask=mask: {"mask": mask}) for name, mask in MASKS.items()},
    "bias (L, S)": _biased(L, S),
    "bias (1, H, L, S)": _biased(1, H, L, S),
    "bias (B, H, L, S)": _biased(B, H, L, S),
    "bias (B, 1, 1, S)": _biased(B, 1, 1, S),
    "two biases": Option(lambda one, two: {"mask": masks.bias(one) & masks.bias(two)}, ((L, S), (1, H, 1, S))),
    "relative bias": Option(_relative, ((4, H),)),
    "positions": Option(
        lambda: {
            "mask": DOCUMENTS & masks.causal(),
            "query_positions": torch.tensor([2, 0, 6, 4, 3]),
            "key_positions": 0,
        }
    ),
    "scale": Option(lambda: {"scale": -0.4}),
    "soft-cap": Option(lambda: {"softcap": 1.3, "mask": masks.causal()}),
    "sinks": Option(lambda sinks: {"sinks": sinks}, ((H,),)),
    "sinks, fully masked rows": Option(lambda sinks: {"sinks": sinks, "mask": BLIND, "return_lse": True}, ((H,),)),
    "dropout": Option(lambda: {"dropout_p": 0.4}),
    "lse": Option(lambda: {"return_lse": True}),
    "lse, fully masked rows": Option(lambda: {"return_lse": True, "mask": BLIND}),
    "everything": Option(_everything, ((L, S), (H,))),
}


def with_option(name: str, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with an option, dropping the same entries in every call."""
    return attend(query, key, value, seed=3, **OPTIONS[name].arguments(*rest))


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
    check_derivatives(lambda *given: finite(with_option(name, *given)), *inputs(name), fast=True)


@pytest.mark.parametrize(
    "name", [name for name in MASKS if name not in ("keep per head", "where", "ALiBi", "combined")]
)
def test_float64_on_pytorchs_kernel(name: str) -> None:
    query, key, _ = inputs(name, kv_heads=H)
    with clearhead.use_kernel("sdpa"):
        check_derivatives(lambda *given: with_option(name, *given), query, key, random(B, H, S, D), fast=True)


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
    check_batched(with_option(name, *given), given)


@pytest.mark.parametrize("name", ["causal", "bias (1, H, L, S)", "sinks, fully masked rows", "everything"])
@pytest.mark.usefixtures("kernel")
def test_bfloat16(name: str) -> None:
    """Errors against float64 are at most twice those of `reference` with one gradient after another."""
    given = inputs(name, torch.bfloat16)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    with clearhead.use_kernel("reference"):
        _, reference = batched_and_looped(with_option(name, *given), given)
        _, expected = batched_and_looped(with_option(name, *exact), exact)
    found, looped = batched_and_looped(with_option(name, *given), given)
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
    output, lse = with_option("everything", *given)
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
    monkeypatch.setattr("clearhead.kernels._sdpa.SdpaKernel.refusals", lambda self, layout, bound: ())
    x = random(1, 2, 3, 2)
    with clearhead.use_kernel("sdpa"):
        output = clearhead.attention(x, x, x, dropout_p=0.5)
    with pytest.raises(clearhead.errors.KernelError, match=r"create_graph=True: sdpa drew its own dropout"):
        torch.autograd.grad(output.sum(), x, create_graph=True)


# Calls of which only one input needs a gradient: it is the one that a call gives of which all do.


Results = Tensor | tuple[Tensor, ...]
NAMES = ("causal", "bias (1, H, L, S)", "bias (L, S)", "sinks", "sinks, fully masked rows", "lse", "everything")


def weights_of(name: str, query: Tensor, key: Tensor, _: Tensor, *parameters: Tensor) -> Results:
    arguments = {x: y for x, y in OPTIONS[name].arguments(*parameters).items() if x not in ("dropout_p", "return_lse")}
    return clearhead.attention_weights(query, key, **arguments)


def gradients_of(function: Callable[..., Results], name: str, given: list[Tensor], number: int) -> list[Tensor]:
    """Of one input: plain, under ``create_graph=True``, differentiated again, and many at once."""
    results = finite(function(name, *given))
    results = (results,) if isinstance(results, Tensor) else results
    loss = torch.stack([x.sin().sum() for x in results]).sum()
    options = {"retain_graph": True, "materialize_grads": True}
    (plain,) = torch.autograd.grad(loss, given[number], **options)
    (again,) = torch.autograd.grad(loss, given[number], create_graph=True, **options)
    second = torch.zeros_like(plain)
    if again.requires_grad:
        (second,) = torch.autograd.grad(again.square().sum(), given[number], **options)
    return [plain, again.detach(), second, *(x[0] for x in batched_and_looped(results, (given[number],)))]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("function", [with_option, weights_of])
@pytest.mark.parametrize("name", NAMES)
def test_one_input_alone(name: str, function: Callable[..., Results], dtype: torch.dtype) -> None:
    shapes = ((B, H, L, D), (B, 1, S, D), (B, 1, S, Dv), *OPTIONS[name].shapes)
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    for number in range(len(tensors)):
        if function is weights_of and number == 2:  # the value
            continue
        alone = [x.clone().requires_grad_(index == number) for index, x in enumerate(tensors)]
        together = [x.clone().requires_grad_() for x in tensors]
        found, expected = (gradients_of(function, name, given, number) for given in (alone, together))
        for gradient, of_all in zip(found, expected, strict=True):
            allowed = TOLERANCES[dtype] * max(1.0, float(of_all.abs().max()))
            torch.testing.assert_close(
                gradient, of_all, rtol=0, atol=allowed, msg=lambda x, n=number: f"input {n}: {x}"
            )


@pytest.mark.usefixtures("kernel")
def test_lse_of_a_call_whose_only_learnt_input_is_the_value() -> None:
    value = torch.randn(B, 1, S, Dv, requires_grad=True)
    _, lse = clearhead.attention(torch.randn(B, H, L, D), torch.randn(B, 1, S, D), value, return_lse=True)
    if lse.requires_grad:
        (gradient,) = torch.autograd.grad(lse.sum(), value, create_graph=True, materialize_grads=True)
        assert not gradient.any()


# A sink of −∞ is no sink: outputs, lse, weights and gradients are those without it.


ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mask", [None, BLIND], ids=["no mask", "fully masked rows"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_is_none(dtype: torch.dtype, mask: masks.Mask | None, create_graph: bool) -> None:
    query, key, value = (torch.randn(B, H, n, D, dtype=dtype, requires_grad=True) for n in (L, S, S))
    sinks = torch.full((H,), float("-inf"), dtype=dtype, requires_grad=True)

    def results(sinks: Tensor | None) -> list[Tensor]:
        output, lse = clearhead.attention(query, key, value, mask, sinks=sinks, return_lse=True)
        weights_of = clearhead.attention_weights(query, key, mask, sinks=sinks)
        loss = output.sin().sum() + weights_of.sin().sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()
        leaves = (query, key, value) if sinks is None else (query, key, value, sinks)
        return [
            x.detach() for x in (output, lse, weights_of, *torch.autograd.grad(loss, leaves, create_graph=create_graph))
        ]

    *found, gradient = results(sinks)
    assert not gradient.any()
    torch.testing.assert_close(found, results(None), rtol=0, atol=ROUNDING[dtype])
