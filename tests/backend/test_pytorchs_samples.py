"""PyTorch's own samples of `scaled_dot_product_attention`, forward and backward, with and without Clearhead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead
from tests.backend.small_calls import compute_small_calls


@functools.cache
def attention() -> Any:
    """PyTorch's description of the operator. Importing those of all operators takes two seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return next(info for info in op_db if info.name == "nn.functional.scaled_dot_product_attention")


def exact(x: Any) -> Any:
    return x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, Tensor) and x.is_floating_point() else x


def results(sample: Any, change: Callable[[Any], Any] = lambda x: x) -> list[Tensor]:
    """The output and every gradient of a sample, in float64."""
    inputs = [change(x) for x in (sample.input, *sample.args)]
    options = {name: change(value) for name, value in sample.kwargs.items()}
    output = attention()(*inputs, **options)
    learnt = [x for x in (*inputs, *options.values()) if isinstance(x, Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(output.double().sin().sum(), learnt)
    return [x.detach().double() for x in (output, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_samples(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples hold scores of some hundred, which are rounded: twice the error of PyTorch's worse way is allowed."""
    compute_small_calls(monkeypatch)
    drawn = attention().sample_inputs("cpu", dtype, requires_grad=True)
    samples = [each for each in drawn if not each.kwargs["dropout_p"]]
    assert len(samples) > 10
    changed = 0
    for sample in samples:
        right, theirs = results(sample, exact), results(sample)
        with sdpa_kernel(SDPBackend.MATH):
            formula = results(sample)
        with clearhead.activate():
            ours = results(sample)
        changed += not all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
        for found, pytorchs, by_formula, expected in zip(ours, theirs, formula, right, strict=True):
            largest = max(1.0, float(expected.abs().max()))
            rounded = max(float((each - expected).abs().max()) for each in (pytorchs, by_formula))
            allowed = max(1e-5 * largest, 2 * rounded)
            assert (found - expected).abs().max() <= allowed
    assert changed  # Clearhead's kernel computed some of them
