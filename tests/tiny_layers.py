"""Layers that attend to a few numbers, and whether a call of one went in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead._native import extension

B, L, H, D = 3, 5, 2, 7
E = H * D

needs_native = pytest.mark.skipif(extension is None, reason="the extension was not built here")

KINDS: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: clearhead.MultiHeadAttention(E, H),
    "without biases": lambda: clearhead.MultiHeadAttention(E, H, bias=False),
    "one bias": lambda: clearhead.MultiHeadAttention(E, H, bias=False, out_bias=True),
    "grouped": lambda: clearhead.MultiHeadAttention(E, 4, num_kv_heads=2, head_dim=3),
    "other features": lambda: clearhead.MultiHeadAttention(11, H, qdim=E, kdim=E, vdim=E, head_dim=D),
    "scaled": lambda: clearhead.MultiHeadAttention(E, H, scale=0.3),
    "drop-in": lambda: clearhead.nn.MultiheadAttention(E, H, batch_first=True),
    "drop-in, length first": lambda: clearhead.nn.MultiheadAttention(E, H),
    "drop-in without bias": lambda: clearhead.nn.MultiheadAttention(E, H, bias=False, batch_first=True),
}
kinds = pytest.mark.parametrize("kind", KINDS)
causal = pytest.mark.parametrize("causal", [False, True])


def made(kind: str) -> nn.Module:
    module = KINDS[kind]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def run(module: nn.Module, x: Tensor, causal: bool = False) -> Tensor:
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x, need_weights=False, is_causal=causal)[0]
    return module(x, mask=masks.causal() if causal else None)


def input_of(dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.linspace(-2, 2, B * L * E, dtype=dtype).view(B, L, E).sin().requires_grad_(**options)


def went_in_one_step(output: Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_OneStepBackward"
