"""Products with laid-out weights: bias and activation in one pass, on oneDNN and without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from clearhead._encoder import products
from clearhead._encoder.products import Affine, Product
from clearhead._native import extension
from clearhead._torch_private import has_onednn_linear


@pytest.fixture(params=["own", "oneDNN", "PyTorch"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "own" and extension is None:
        pytest.skip("the native kernel was not built")
    if request.param == "oneDNN" and not has_onednn_linear():
        pytest.skip("this build of PyTorch has no oneDNN")
    monkeypatch.setattr(products, "few_rows", lambda: 1000 if request.param == "own" else 0)
    monkeypatch.setattr(products, "lays_out_weights", lambda: request.param == "oneDNN")


GELUS = {"gelu of PyTorch": torch.nn.GELU(), "its tanh form": torch.nn.GELU("tanh")}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu of PyTorch": F.gelu,
    "its tanh form": lambda x: F.gelu(x, approximate="tanh"),
}


def maps(sizes: list[int], inputs: int, biases: bool) -> list[Affine]:
    return [Affine(torch.randn(size, inputs), torch.randn(size) if biases else None) for size in sizes]


def applied(x: Tensor, of: list[Affine]) -> Tensor:
    """In float64."""
    biases = [None if each.bias is None else each.bias.double() for each in of]
    return torch.cat(
        [F.linear(x.double(), each.weight.double(), bias) for each, bias in zip(of, biases, strict=True)], -1
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 24), (3, 5, 24), (40, 24)])
def test_products_with_activations(name: str, shape: tuple[int, ...]) -> None:
    x, of = torch.randn(shape), maps([8, 16], 24, biases=True)
    expected = ACTIVATIONS[name](applied(x, of))
    actual = Product(of, torch.float32, GELUS.get(name) or ACT2FN[name])(x)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 2e-6 * max(1, expected.abs().max())


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, False)])
def test_products_with_and_without_biases(biases: tuple[bool, bool]) -> None:
    of = [maps([6], 12, has)[0] for has in biases]
    x = torch.randn(2, 9, 12)
    assert (Product(of, torch.float32)(x) - applied(x, of)).abs().max() <= 1e-5


def test_products_of_several_maps_and_other_types_keep_copies() -> None:
    for sizes, dtype in (([6, 4], torch.float32), ([6], torch.bfloat16)):
        of, x = maps(sizes, 12, biases=True), torch.randn(4, 12).to(dtype)
        product = Product(of, dtype)
        before = product(x)
        of[0].weight.zero_()
        assert torch.equal(product(x), before)


def test_a_product_follows_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    of = maps([6], 12, biases=True)
    product = Product(of, torch.float32, ACT2FN["gelu"])
    for most in (4, 0, 4):
        monkeypatch.setattr(products, "few_rows", lambda most=most: most)
        for rows in (4, 5):
            x = torch.randn(rows, 12)
            assert (product(x) - F.gelu(applied(x, of))).abs().max() <= 1e-5


def test_products_in_bfloat16() -> None:
    of, x = maps([6, 4], 64, biases=True), torch.randn(4, 64)
    actual, expected = Product(of, torch.bfloat16)(x.bfloat16()), applied(x, of)
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).abs().max() <= 2**-7 * expected.abs().max()


def test_a_class_of_a_known_name_is_not_taken_for_it() -> None:
    class ReLU(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3

    of, x = maps([6], 12, biases=True), torch.randn(4, 12)
    assert (Product(of, torch.float32, ReLU())(x) - 3 * applied(x, of)).abs().max() <= 1e-4
