"""Inputs whose elements share memory: outputs and derivatives against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import KernelError
from tests.support.budgets import in_turn
from tests.support.comparing import TOLERANCES

B, H, L, S, D = 2, 3, 5, 7, 11
#: In float32 `native` is chosen where it was built.
KERNELS = ("sdpa", "chunked", "reference", "chosen")
Inputs = tuple[Tensor, ...]
BLIND = masks.keep(keys=torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0] * S]))


def expanded(dim: int) -> tuple[list[tuple[int, ...]], Callable[..., Inputs]]:
    """Query, key and value with a stride of 0."""
    shapes = [(B, H, L, D), (B, H, S, D), (B, H, S, D)]
    small = [tuple(1 if at == dim else size for at, size in enumerate(shape)) for shape in shapes]
    return small, lambda *leaves: tuple(x.expand(shape) for x, shape in zip(leaves, shapes, strict=True))


#: Shapes of leaves, and query, key and value made from them.
SHARED: dict[str, tuple[list[tuple[int, ...]], Callable[..., Inputs]]] = {
    "batch expanded": expanded(0),
    "heads expanded": expanded(1),
    "rows expanded": expanded(2),
    "features expanded": expanded(3),
    "rows that overlap": (
        [(B, H, L + D - 1), (B, 1, S + D - 1), (B, 1, S + D - 1)],
        lambda *leaves: tuple(x.unfold(-1, D, 1) for x in leaves),
    ),
    "heads that overlap": (
        [(B, 1, H + D - 1), (B, S, H + D - 1), (B, S, H + D - 1)],
        lambda *leaves: tuple(x.unfold(-1, D, 1).transpose(1, 2) for x in leaves),
    ),
    "one tensor": ([(B, H, S, D)], lambda x: (x[:, :, :L], x, x)),
    "slices of one tensor": ([(B, H, S, 2 * D)], lambda x: (x[:, :, :L, :D], x[..., 1 : D + 1], x[..., D:])),
}


def derivatives(kernel: str, given: Inputs, leaves: Inputs, **options: Any) -> list[Tensor]:
    """Output, first derivatives, the same under ``create_graph=True``, and second ones."""
    with clearhead.use_kernel(kernel) if kernel != "chosen" else torch.enable_grad():
        output = clearhead.attention(*given, **options)
    first = torch.autograd.grad(output.sin().sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum((x.square().sum() for x in again), torch.zeros(())), leaves)
    return [x.detach() for x in (output, *first, *again, *second)]


def copies(given: Inputs) -> Inputs:
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in given)


@functools.cache
def of_copies(name: str, mask: masks.Mask | None, dtype: torch.dtype) -> tuple[Inputs, list[Tensor], list[Tensor]]:
    """Leaves in the dtype, and the derivatives from copies: in float64, and in the dtype."""
    shapes, inputs = SHARED[name]
    exact = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    leaves = tuple(x.detach().to(dtype).requires_grad_() for x in exact)
    expected, reference = (derivatives("reference", copies(inputs(*x)), x, mask=mask) for x in (exact, leaves))
    return leaves, expected, reference


@in_turn({"name": SHARED, "kernel": KERNELS, "mask": [None, masks.causal(), BLIND]}, {"dtype": TOLERANCES})
def test_shared_memory(name: str, mask: masks.Mask | None, kernel: str, dtype: torch.dtype) -> None:
    """Differentiated twice, float32 may cost four times the rounding errors that `reference` has of copies, if more."""
    inputs = SHARED[name][1]
    leaves, expected, reference = of_copies(name, mask, dtype)
    try:
        runs = [derivatives(kernel, inputs(*leaves), leaves, mask=mask) for _ in range(2)]  # planned, and cached
    except KernelError:
        assert kernel == "sdpa"
        pytest.skip("PyTorch has no fused kernel for this call")
    allowed = TOLERANCES[dtype] * max(1.0, *(float(right.abs().max()) for right in expected[: -len(leaves)]))
    for found in runs:
        for index, (one, other, right) in enumerate(zip(found, reference, expected, strict=True)):
            error, rounding = ((x.double() - right).abs().max() for x in (one, other))
            second = index >= len(found) - len(leaves)
            assert error <= (max(allowed, 4 * rounding) if second else allowed)
