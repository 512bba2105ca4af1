"""Norms, products of rows and rotations in C++, on every instruction set of this processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead._encoder import steps
from clearhead._encoder.steps import ACTIVATIONS, Norm, affine, normalize, rotate
from clearhead._native import extension, instruction_sets

pytestmark = pytest.mark.skipif(extension is None, reason="the native kernel was not built")

#: The largest error relative to the largest result.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(params=list(instruction_sets()), autouse=True)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "instruction_set_number", lambda: instruction_sets()[request.param])


def expected_norm(x: Tensor, norm: Norm) -> Tensor:
    """In float64."""
    x = x.double()
    center = x.mean(-1, keepdim=True) if norm.centers else 0
    y = (x - center) / ((x - center).square().mean(-1, keepdim=True) + norm.epsilon).sqrt()
    y = y if norm.weight is None else y * norm.weight.double()
    return y if norm.bias is None else y + norm.bias.double()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("centers", [True, False])
@pytest.mark.parametrize(("rows", "features"), [(1, 1), (3, 7), (5, 16), (2, 33), (130, 384), (1, 1023)])
def test_residual_and_norm(rows: int, features: int, centers: bool, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(rows, features).to(dtype) for _ in range(2))
    norm = Norm(torch.randn(features), torch.randn(features) if centers else None, 1e-5, centers)
    exact = x.double() + residual.double()
    expected, total = expected_norm(exact, norm), torch.empty_like(x)
    kept, y = residual.clone(), x.clone()
    assert normalize(y, norm, residual, total) is y
    assert torch.equal(residual, kept)
    assert near(y, expected, dtype)
    assert near(total, exact, dtype)
    in_place = x.clone()
    normalize(in_place, norm, residual, total=residual)  # the residual may be replaced by the sum
    assert torch.equal(in_place, y)
    assert torch.equal(residual, total)


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return bool((actual.double() - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max())


def test_norms_without_parameters_and_residual() -> None:
    x = torch.randn(4, 5, 24)
    norm = Norm(None, None, 1e-12, True)
    assert near(normalize(x.clone(), norm), expected_norm(x, norm), torch.float32)
    assert normalize(torch.empty(0, 24), norm).shape == (0, 24)


def test_large_means_keep_their_digits() -> None:
    x = torch.randn(8, 512) + 1000
    norm = Norm(None, None, 1e-5, True)
    assert (normalize(x.clone(), norm) - expected_norm(x, norm)).abs().max() <= 1e-3  # 1000 has 6e-5 of rounding


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 40)
    x[1, 3] = float("nan")
    y = normalize(x, Norm(None, None, 1e-5, True))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "inner", "outer"), [(1, 1, 1), (3, 7, 5), (2, 40, 16), (13, 33, 67), (16, 384, 132), (70, 129, 65)]
)
def test_products_of_rows(rows: int, inner: int, outer: int, activation: str, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, inner), (outer, inner), (outer,)))
    weight *= inner**-0.5
    for given in (bias, None):
        wanted = None if given is None else given.double()
        exact = F.linear(x.double(), weight.double(), wanted)
        actual = affine(x, weight, given, activation)
        assert actual.dtype == dtype
        # Relative to what the activation is applied to, whose rounding its result inherits.
        error = (actual - FORMULAS[activation](exact)).abs().max()
        assert error <= BOUNDS[dtype] * exact.abs().max()


def test_activations_of_any_size() -> None:
    x = torch.cat([torch.linspace(-200, 200, 4001), torch.linspace(-6, 6, 4001), torch.tensor([0.0, 1e30])])
    for name, formula in FORMULAS.items():
        actual = affine(x[:, None], torch.ones(1, 1), None, name)[:, 0]
        expected = formula(x.double())
        assert (actual - expected).abs().le(3e-7 * x.abs().clamp(min=1)).all(), name


def test_products_of_no_rows_and_of_nan() -> None:
    weight = torch.randn(9, 20)
    assert affine(torch.empty(2, 0, 20), weight, None).shape == (2, 0, 9)
    x = torch.randn(5, 20)
    x[2, 3] = float("nan")
    for name in ACTIVATIONS:
        y = affine(x, weight, None, name)
        assert y[2].isnan().all(), name
        assert y[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "dim", "more"), [(1, 2, 0), (3, 8, 5), (4, 64, 64), (2, 34, 0)])
@pytest.mark.parametrize("positions", [6, 3])
def test_rotation(positions: int, heads: int, dim: int, more: int, dtype: torch.dtype) -> None:
    x = torch.randn(6, heads * dim + more).to(dtype)
    cosine, sine = torch.randn(positions, dim), torch.randn(positions, dim)
    of_heads = x[:, : heads * dim].double().view(6, heads, dim)
    first, second = of_heads.chunk(2, -1)
    tables = [table.double().repeat(6 // positions, 1)[:, None] for table in (cosine, sine)]
    expected = of_heads * tables[0] + torch.cat([-second, first], -1) * tables[1]
    rest = x[:, heads * dim :].clone()
    rotate(x, heads, cosine, sine)
    assert near(x[:, : heads * dim].view(6, heads, dim), expected, dtype)
    assert torch.equal(x[:, heads * dim :], rest)
