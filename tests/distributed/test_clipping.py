"""`clip_grad_norm_` on one process; on several in test_training.py and test_pages.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from clearhead.distributed import clip_grad_norm_
from clearhead.errors import ArgumentError, DTypeError


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(3)
    found = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((5, 3), (7,), (0,), ())]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter) * 11
    return [*found, nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("most", [0, 0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_norm_of_all_gradients(dtype: torch.dtype, most: float) -> None:
    parameters = _parameters(dtype)
    before = torch.cat([x.grad.double().flatten() for x in parameters if x.grad is not None])
    norm = clip_grad_norm_(iter([*parameters, parameters[0]]), most)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, before.norm(), rtol=1e-6, atol=0)
    expected = before * min(1.0, most / (before.norm().item() + 1e-6))
    found = torch.cat([x.grad.double().flatten() for x in parameters if x.grad is not None])
    torch.testing.assert_close(found, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert parameters[-1].grad is None


def test_without_gradients_it_is_zero() -> None:
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(nn.Parameter(torch.ones(3)), 1.0) == 0


@pytest.mark.parametrize(
    ("parameters", "most", "kind", "said"),
    [
        ([], -1.0, ArgumentError, "max_norm: expected a number of at least 0, got -1.0."),
        ([], float("nan"), ArgumentError, "max_norm: expected a number of at least 0, got nan."),
        ([], "1", DTypeError, "max_norm: expected a number of at least 0, got str."),
        (3, 1.0, DTypeError, "parameters: expected tensors, got 3."),
        ([torch.zeros(1), "x"], 1.0, DTypeError, "parameters: expected tensors, got str."),
    ],
)
def test_wrong_arguments(parameters: Any, most: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        clip_grad_norm_(parameters, most)
    assert str(caught.value) == said
