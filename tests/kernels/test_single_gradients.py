"""Calls of which only one input needs a gradient: it is the one that a call gives of which all do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead
from tests.support.comparing import TOLERANCES
from tests.support.derivatives import batched_and_looped, finite

from .derivative_cases import OPTIONS, B, D, Dv, H, L, S, attend

Results = Tensor | tuple[Tensor, ...]
NAMES = ("causal", "bias (1, H, L, S)", "bias (L, S)", "sinks", "sinks, fully masked rows", "lse", "everything")


def weights(name: str, query: Tensor, key: Tensor, _: Tensor, *parameters: Tensor) -> Results:
    arguments = {x: y for x, y in OPTIONS[name].arguments(*parameters).items() if x not in ("dropout_p", "return_lse")}
    return clearhead.attention_weights(query, key, **arguments)


def gradients(function: Callable[..., Results], name: str, given: list[Tensor], number: int) -> list[Tensor]:
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
@pytest.mark.parametrize("function", [attend, weights])
@pytest.mark.parametrize("name", NAMES)
def test_one_input_alone(name: str, function: Callable[..., Results], dtype: torch.dtype) -> None:
    shapes = ((B, H, L, D), (B, 1, S, D), (B, 1, S, Dv), *OPTIONS[name].shapes)
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    for number in range(len(tensors)):
        if function is weights and number == 2:  # the value
            continue
        alone = [x.clone().requires_grad_(index == number) for index, x in enumerate(tensors)]
        together = [x.clone().requires_grad_() for x in tensors]
        found, expected = (gradients(function, name, given, number) for given in (alone, together))
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
