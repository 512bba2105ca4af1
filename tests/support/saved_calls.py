"""Calls whose gradients are compared under hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import masks
from tests.support.attending import attend
from tests.support.native import needs_native

B, H, HKV, L, S, D = 2, 6, 3, 7, 11, 5
KERNELS = [pytest.param("native", marks=needs_native), "chunked", "sdpa"]


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Laid out (B, L, H, D), as a projection gives it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float().to(dtype)
    return (x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x).requires_grad_()


MASKS: dict[str, Callable[[Tensor], masks.Mask | None]] = {
    "none": lambda bias: None,
    "causal": lambda bias: masks.causal(),
    "lengths": lambda bias: masks.lengths(torch.tensor([S, 4])),
    "keep": lambda bias: masks.keep((torch.arange(L)[:, None] + 2 * torch.arange(S)) % 5 > 0),
    "bias": lambda bias: masks.bias(bias) & masks.keep(keys=torch.arange(S) < torch.tensor([[S], [8]])),
}


def leaves(name: str, kernel: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    heads = HKV if kernel != "sdpa" else H
    inputs = {
        "query": leaf(B, H, L, D, seed=1, dtype=dtype),
        "key": leaf(B, heads, S, D, seed=2, dtype=dtype),
        "value": leaf(B, heads, S, D, seed=3, dtype=dtype),
    }
    if kernel != "sdpa":
        inputs["sinks"] = leaf(H, seed=4, dtype=dtype)
        if name == "bias":
            inputs["bias"] = leaf(1, H, L, S, seed=5, dtype=dtype)
    return inputs


def output_of(name: str, kernel: str, inputs: dict[str, Tensor]) -> Tensor:
    options: dict[str, Any] = {"sinks": inputs["sinks"]} if "sinks" in inputs else {}
    mask = MASKS[name](inputs.get("bias", torch.zeros(1, H, L, S)))
    return attend(inputs["query"], inputs["key"], inputs["value"], mask, kernel=kernel, **options)


def derived(output: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad((output * factors(output)).sum(), list(inputs.values()))
    return dict(zip(inputs, found, strict=True))


def factors(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)


@cache
def exact(name: str, kernel: str) -> dict[str, Tensor]:
    inputs = leaves(name, kernel, torch.float64)
    return derived(output_of(name, "reference", inputs), inputs)
