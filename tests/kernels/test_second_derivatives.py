"""First and second derivatives entry by entry, and ``create_graph=True`` against a plain backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.kernels._sdpa import SdpaKernel
from tests.support.comparing import KERNELS
from tests.support.derivatives import check_derivatives, random

kernels = pytest.mark.parametrize("kernel", KERNELS)
with_lse = pytest.mark.parametrize("kernel", ["chunked", "reference"])


def on(kernel: str, *args: object, **options: object) -> Tensor | tuple[Tensor, Tensor]:
    with clearhead.use_kernel(kernel):
        return clearhead.attention(*args, **options)


@kernels
@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.keep(keys=torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]])),
        masks.sliding_window(1, 0) & masks.lengths(torch.tensor([5, 2])),
    ],
    ids=lambda mask: mask.describe() if mask else "none",
)
def test_query_key_and_value(kernel: str, mask: masks.Mask | None) -> None:
    check_derivatives(
        lambda query, key, value: on(kernel, query, key, value, mask),
        random(2, 2, 3, 2),
        random(2, 1, 5, 2),
        random(2, 1, 5, 2),
    )


@with_lse
def test_one_bias_given_twice(kernel: str) -> None:
    x = random(1, 2, 3, 2)
    check_derivatives(lambda bias: on(kernel, x, x, x, masks.bias(bias) & masks.bias(bias)), random(3, 3))


# A bias that the query, key or value is made from gets its own gradient and theirs.
@with_lse
def test_one_tensor_as_key_and_bias(kernel: str) -> None:
    x = random(1, 2, 3, 3)
    check_derivatives(lambda t: on(kernel, x, t, x, masks.bias(t)), random(1, 2, 3, 3))


@with_lse
def test_query_made_from_the_bias(kernel: str) -> None:
    x = random(1, 2, 3, 3)
    check_derivatives(lambda bias: on(kernel, x + bias, x, x, masks.bias(bias)), random(3, 3))


def test_weights_of_one_tensor() -> None:
    check_derivatives(lambda x: clearhead.attention_weights(x, x, masks.causal()), random(1, 2, 3, 2))


def test_weights_of_a_query_made_from_the_bias() -> None:
    x = random(1, 2, 3, 3)
    check_derivatives(lambda bias: clearhead.attention_weights(x + bias, x, masks.bias(bias)), random(3, 3))


@kernels
def test_gradient_penalty_through_the_module(kernel: str) -> None:
    """The penalty's gradient in the parameters equals that of the reference kernel."""
    module = clearhead.MultiHeadAttention(6, 2).double()
    x = random(2, 5, 6)

    def penalty_gradients(name: str) -> tuple[Tensor, ...]:
        with clearhead.use_kernel(name):
            output = module(x, mask=masks.causal())
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        # The output's bias moves the loss and so the penalty; every parameter takes part.
        return torch.autograd.grad(gradient.square().sum(), tuple(module.parameters()), allow_unused=True)

    for found, expected in zip(penalty_gradients(kernel), penalty_gradients("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_create_graph_with_a_dropout_that_cannot_be_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's CPU kernels have no dropout, so one that has is pretended."""
    monkeypatch.setattr(SdpaKernel, "refusals", lambda self, spec, mask, grid: ())
    x = random(1, 2, 3, 2)
    output = on("sdpa", x, x, x, dropout_p=0.5)
    with pytest.raises(clearhead.errors.KernelError, match=r"create_graph=True: sdpa drew its own dropout"):
        torch.autograd.grad(output.sum(), x, create_graph=True)
