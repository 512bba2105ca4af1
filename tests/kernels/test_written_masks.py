"""Writing to a mask's tensor between forward and backward is refused, or changes no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.native import needs_native

B, H, L, D = 2, 3, 5, 7
Case = Callable[[Tensor], dict[str, Any]]

#: A tensor, what is called with it, and what is written to it.
CASES: dict[str, tuple[Tensor, Case, Any]] = {
    "keep": (torch.ones(L, L, dtype=torch.bool).tril(), lambda t: {"mask": masks.keep(t)}, True),
    "a bool tensor": (torch.ones(L, L, dtype=torch.bool).tril(), lambda t: {"mask": t}, True),
    "keys": (torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]]).bool(), lambda t: {"mask": masks.keep(keys=t)}, True),
    "lengths": (torch.tensor([3, 4]), lambda t: {"mask": masks.lengths(t) & masks.causal()}, 5),
    "an alternative": (torch.tensor([1, 2]), lambda t: {"mask": masks.causal() | masks.prefix(t)}, 5),
    "bias": (torch.zeros(L, L), lambda t: {"mask": masks.bias(t)}, 3.0),
    "positions": (torch.arange(L), lambda t: {"mask": masks.causal(), "query_positions": t}, 4),
}


@pytest.mark.parametrize("kernel", [pytest.param("native", marks=needs_native), "sdpa", "chunked", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, kernel: str) -> None:
    tensor, case, written = CASES[name]
    tensor, query, key = tensor.clone(), torch.randn(B, H, L, D, requires_grad=True), torch.randn(B, H, L, D)
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(query, key, key, **case(tensor))
    (expected,) = torch.autograd.grad(output.square().sum(), query, retain_graph=True)
    tensor.fill_(written)
    if kernel in ("native", "chunked") or (kernel, name) == ("sdpa", "bias"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output.square().sum(), query)
    else:  # they have read it for good
        assert torch.equal(torch.autograd.grad(output.square().sum(), query)[0], expected)


@pytest.mark.parametrize("average", [False, True])
def test_weights(average: bool) -> None:
    marks, query = torch.ones(L, L).tril().bool(), torch.randn(B, H, L, D, requires_grad=True)
    key = torch.randn(B, H, L, D)
    weights = clearhead.attention_weights(query, key, marks, average_attn_weights=average)
    marks.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(weights.square().sum(), query)


def test_masks_made_in_inference_mode_train() -> None:
    with torch.inference_mode():
        mask = masks.keep(torch.ones(L, L, dtype=torch.bool).tril())
    x = torch.randn(B, H, L, D, requires_grad=True)
    losses = (clearhead.attention(x, x, x, each).square().sum() for each in (mask, masks.causal()))
    torch.testing.assert_close(*(torch.autograd.grad(loss, x) for loss in losses))
