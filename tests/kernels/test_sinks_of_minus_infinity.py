"""A sink of −∞ is no sink: outputs, lse, weights and gradients are those without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks

B, H, L, S, D = 2, 3, 5, 7, 11
BLIND = masks.keep(keys=torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0] * S])) & masks.causal()
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mask", [None, BLIND], ids=["no mask", "fully masked rows"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_is_none(dtype: torch.dtype, mask: masks.Mask | None, create_graph: bool) -> None:
    query, key, value = (torch.randn(B, H, n, D, dtype=dtype, requires_grad=True) for n in (L, S, S))
    sinks = torch.full((H,), float("-inf"), dtype=dtype, requires_grad=True)

    def results(sinks: Tensor | None) -> list[Tensor]:
        output, lse = clearhead.attention(query, key, value, mask, sinks=sinks, return_lse=True)
        weights = clearhead.attention_weights(query, key, mask, sinks=sinks)
        loss = output.sin().sum() + weights.sin().sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()
        leaves = (query, key, value) if sinks is None else (query, key, value, sinks)
        return [
            x.detach() for x in (output, lse, weights, *torch.autograd.grad(loss, leaves, create_graph=create_graph))
        ]

    *found, gradient = results(sinks)
    assert not gradient.any()
    for one, other in zip(found, results(None), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCES[dtype])
