"""Fake tensors, meta tensors and `make_fx`: no value is read, so every mask works, or is refused with a text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import clearhead
from clearhead import masks

B, H, L, D = 2, 3, 5, 4

MASKS: dict[str, Callable[[], masks.Mask | Tensor]] = {
    "bool tensor": lambda: torch.ones(L, L, dtype=torch.bool),
    "lengths": lambda: masks.lengths(torch.tensor([3, 5])),
    "both lengths": lambda: masks.lengths(torch.tensor([3, 5]), torch.tensor([3, 5])),
    "keys": lambda: masks.keep(keys=torch.ones(B, L)),
    "documents": lambda: masks.documents(torch.tensor([0, 0, 1, 1, 1])),
    "prefix": lambda: masks.causal() | masks.prefix(torch.tensor([1, 2])),
    "window": lambda: masks.sliding_window(1, 0) & masks.drop(keys=torch.zeros(B, L, dtype=torch.bool)),
    "bias": lambda: masks.bias(torch.randn(L, L)),
    "function": lambda: masks.mask_mod(lambda b, h, q, k: q >= k),
    "prepared": lambda: (masks.causal() & masks.lengths(torch.tensor([3, 5]))).prepare(L, batch_size=B),
}


def gradient(mask: masks.Mask | Tensor) -> Tensor:
    x = torch.randn(B, H, L, D, requires_grad=True)
    return torch.autograd.grad(clearhead.attention(x, x, x, mask).sum(), x)[0]


def large_module(mask: masks.Mask | Tensor) -> Tensor:
    """Its padding would be removed if the values of the mask could be read."""
    return clearhead.MultiHeadAttention(512, 4)(torch.randn(B, L, 512), mask=mask)


def weights(mask: masks.Mask | Tensor) -> Tensor:
    return clearhead.MultiHeadAttention(12, H)(torch.randn(B, L, 12), mask=mask, need_weights=True)[1]


def statistics(mask: masks.Mask | Tensor) -> Tensor:
    x = torch.randn(B, H, L, D)
    return clearhead.attention_statistics(x, x, mask, statistics=("entropy",)).entropy


CALLS = {"gradient": gradient, "large module": large_module, "weights": weights, "statistics": statistics}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mask", MASKS)
def test_fake_tensors(mask: str, call: str) -> None:
    expected = CALLS[call](MASKS[mask]()).shape
    with FakeTensorMode():
        assert CALLS[call](MASKS[mask]()).shape == expected


def test_packed_sequences_of_fake_tensors() -> None:
    with FakeTensorMode():
        x, ends = torch.randn(7, H, D), torch.tensor([0, 3, 7])
        assert clearhead.attention_varlen(x, x, x, ends, ends, masks.causal()).shape == x.shape


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_holds_for_other_values(mode: str) -> None:
    def function(x: Tensor, lengths: Tensor) -> Tensor:
        return clearhead.attention(x, x, x, masks.lengths(lengths) & masks.causal())

    x = torch.randn(B, H, L, D)
    graph = make_fx(function, tracing_mode=mode)(x, torch.tensor([5, 5]))  # pyright: ignore[reportArgumentType]
    for lengths in (torch.tensor([5, 5]), torch.tensor([3, 0])):
        torch.testing.assert_close(graph(x, lengths), function(x, lengths))


@pytest.mark.parametrize("mask", ["lengths", "keys", "documents", "prefix"])
def test_masks_on_meta_say_what_they_need(mask: str) -> None:
    with torch.device("meta"), pytest.raises(clearhead.errors.DeviceError, match="Move it to a real device"):
        gradient(MASKS[mask]())
