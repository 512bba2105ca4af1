"""Gradients of a learnt bias from the native kernel, against `reference` in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from tests.support.comparing import require_half_as_good
from tests.support.native import needs_native, threads

B, H, GROUP, L, S, D, DV = 2, 6, 3, 101, 151, 7, 5

OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"hiding": True}, {"softcap": 0.7}, {"dropout_p": 0.3}],
    ids=["plain", "hiding", "soft-cap", "dropout"],
)

pytestmark = needs_native


def hiding(bias: Tensor) -> Mask:
    """Beside the learnt bias: rows that see nothing, keys that an item hides, and a bias that is given."""
    kept = torch.arange(S)[None] < torch.tensor([[S], [97]])
    given = torch.linspace(-1, 1, B * S, dtype=bias.dtype).view(B, 1, 1, S)
    return masks.bias(bias) & masks.causal("bottom_right") & masks.keep(keys=kept) & masks.bias(given)


def gradients(kernel: str, bias: Tensor, dtype: torch.dtype, **options: object) -> list[Tensor]:
    """Of query, key, value and the bias."""
    random = torch.Generator().manual_seed(5)
    shapes = ((B, H, L, D), (B, H // GROUP, S, D), (B, H // GROUP, S, DV))
    inputs = [_exact(shape, random, dtype).requires_grad_() for shape in shapes]
    learnt = bias.detach().to(dtype).requires_grad_()
    mask = hiding(learnt) if options.pop("hiding", False) else masks.bias(learnt)
    torch.manual_seed(3)
    with clearhead.use_kernel(kernel):
        output, lse = clearhead.attention(*inputs, mask, return_lse=True, **options)  # pyright: ignore
    upstream = _exact(output.shape, random, dtype)
    loss = (output * upstream).sum() + lse[lse.isfinite()].sum() / 3
    return list(torch.autograd.grad(loss, (*inputs, learnt)))


def _exact(shape: tuple[int, ...], random: torch.Generator, dtype: torch.dtype) -> Tensor:
    """The same numbers in every dtype."""
    return torch.randn(shape, generator=random).bfloat16().to(dtype)


def assert_exact(bias: Tensor, **options: object) -> None:
    exact = gradients("reference", bias, torch.float64, **options)
    for found, expected in zip(gradients("native", bias, torch.float32, **options), exact, strict=True):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("shape", [(1, H, L, S), (B, H, L, S), (B * H, L, S)], ids=str)
@OPTIONS
def test_equals_the_exact_one(shape: tuple[int, ...], options: dict[str, object], instructions: str) -> None:
    assert_exact(torch.randn(shape), **options)


@pytest.mark.parametrize("count", [2, 3])
def test_threads_add_it_up_in_one_order(count: int) -> None:
    bias = torch.randn(1, H, L, S)
    with threads(count):
        assert_exact(bias)
        found = [gradients("native", bias, torch.float32)[-1] for _ in range(5)]
    assert all(torch.equal(found[0], other) for other in found)


def test_a_bias_that_hides_gets_no_gradient_there() -> None:
    bias = torch.randn(1, H, L, S)
    bias[:, :, 3:50, 20:] = bias[:, :, 60] = -torch.inf
    assert not gradients("native", bias, torch.float32)[-1][bias == -torch.inf].any()
    assert_exact(bias)


@OPTIONS
def test_of_half_precision(options: dict[str, object], instructions: str) -> None:
    bias = torch.randn(1, H, L, S)
    exact = dict(zip("qkvb", gradients("reference", bias.bfloat16(), torch.float64, **options), strict=True))
    found, reference = (
        dict(zip("qkvb", gradients(kernel, bias, torch.bfloat16, **options), strict=True))
        for kernel in ("native", "reference")
    )
    assert found["b"].dtype == torch.bfloat16
    require_half_as_good(found, reference, exact, torch.bfloat16)


@pytest.mark.parametrize("shape", [(L, S), (1, H, 1, S), (B, 1, L, S)], ids=str)
def test_a_bias_that_is_summed_in_other_ways_goes_elsewhere(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(B, H, L, D), torch.randn(B, H, S, D)
    learnt = torch.zeros(shape, requires_grad=True)
    chosen = clearhead.explain(x, y, y, masks.bias(learnt))
    assert chosen.kernel != "native"
    assert chosen.reasons["native"] == ("it gives a gradient for one bias (1 or B, H, L, S) only, and none in a graph",)
    assert clearhead.explain(x, y, y, masks.bias(learnt.detach())).kernel == "native"
