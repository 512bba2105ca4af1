"""Calls that generated ones do not reach: extreme scores, shared tensors, mixed dtypes, missing batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import KernelError
from clearhead.positions import ALiBi
from tests.support.attending import attend
from tests.support.budgets import in_turn
from tests.support.closeness import TOLERANCES
from tests.support.comparing import KERNELS
from tests.support.derivatives import derivatives, sines, squares
from tests.support.native import needs_native
from tests.support.oracle import Problem, solve

kernels = pytest.mark.parametrize("kernel", KERNELS)


def everything(b: int, h: int, i: int, j: int) -> bool:
    return True


@kernels
def test_without_a_batch(kernel: str) -> None:
    query, key, value = torch.randn(6, 5, 3), torch.randn(2, 7, 3), torch.randn(2, 7, 3)
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(query, key, value, masks.causal("bottom_right"))
    expected = solve(Problem(query[None], key[None], value[None], lambda b, h, i, j: j <= i + 2)).output
    assert output.shape == (6, 5, 3)
    torch.testing.assert_close(output.double(), expected[0], rtol=0, atol=1e-5)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_huge_scores_pick_the_largest(kernel: str, dtype: torch.dtype) -> None:
    """Scores up to ±20,000, beyond what exp takes in float32."""
    key = torch.randn(2, 3, 7, 5).to(dtype)
    query, value = (key * 3000).to(dtype), torch.randn(2, 3, 7, 5).to(dtype)
    if kernel == "sdpa" and dtype != torch.float32:
        assert clearhead.explain(query, key, value).reasons["sdpa"]  # it refuses half precision on the CPU
        return
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(query, key, value)
    expected = solve(Problem(query, key, value, everything)).output
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


@kernels
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_biases_add_in_the_compute_dtype(kernel: str, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    """Two small biases are exact in the scores' dtype, but their sum is not in their own."""
    query, key, value = (torch.randn(2, 3, 7, 5, dtype=dtype) for _ in range(3))
    first, second = (torch.randn(7, 7).to(bias_dtype) for _ in range(2))
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(query, key, value, masks.bias(first) & masks.bias(second))
    expected = solve(Problem(query, key, value, everything, biases=(first, second))).output
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kernel", ["chunked", "reference"])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.sliding_window(2, 1),
        masks.mask_mod(lambda b, h, q, k: (b + h + q + k) % 2 == 0),
        masks.lengths(torch.zeros(0, dtype=torch.int64)),
        masks.keep(keys=torch.zeros(0, 7)),
        masks.documents(torch.zeros(7, dtype=torch.int64)),
        masks.documents(torch.zeros(0, 7, dtype=torch.int64)),
        masks.keep(torch.ones(7, 7)),
        masks.bias(torch.zeros(7, 7)),
    ],
    ids=lambda mask: mask.describe() if mask else "none",
)
def test_an_empty_batch(kernel: str, mask: masks.Mask | None) -> None:
    x = torch.zeros(0, 3, 7, 5, requires_grad=True)
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(x, x, x, mask)
    output.sum().backward()
    assert output.shape == x.grad.shape == (0, 3, 7, 5)
    assert clearhead.attention_weights(x, x, mask).shape == (0, 3, 7, 7)


@pytest.mark.parametrize("kernel", ["chunked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_too_small_for_the_dtype_are_zero_and_no_others(kernel: str, dtype: torch.dtype) -> None:
    """A bias of −80 leaves a weight that float32 can hold, −100 a subnormal one; float64 holds far smaller ones."""
    query, key = torch.zeros(1, 2, 3, 5, dtype=dtype), torch.zeros(1, 2, 4, 5, dtype=dtype)
    value = torch.tensor([0.0, 1e34, 1e43 if dtype == torch.float64 else 1e3, 1e30], dtype=dtype)[
        None, None, :, None
    ].expand(1, 2, 4, 5)
    fall = torch.tensor([[0.0, -80.0, -100.0, torch.finfo(dtype).min]], dtype=dtype)
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(query, key, value, masks.bias(fall))
    expected = solve(Problem(query, key, value, everything, biases=(fall,))).output
    torch.testing.assert_close(output.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)


def test_gradients_under_a_bias_that_falls_far() -> None:
    """ALiBi over distances at which most weights are subnormal or nothing."""
    query, key, value = (torch.randn(1, 2, 401, 7, requires_grad=True) for _ in range(3))

    def results(kernel: str, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (query, key, value)]
        with clearhead.use_kernel(kernel):
            output = clearhead.attention(*inputs, ALiBi(2) & masks.causal(), scale=4.0)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]

    for found, exact in zip(results("chunked", torch.float32), results("reference", torch.float64), strict=True):
        assert (found.double() - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("kernel", [*KERNELS, pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("length", [1, 7, 61])
def test_the_lowest_number_hides_nothing(kernel: str, length: int) -> None:
    """Masks of transformers hold it. A row of it alone weighs all keys alike, and its lse is that number."""
    lowest = torch.finfo(torch.float32).min
    query = torch.randn(1, 2, length, 11, requires_grad=True)
    key, value = (torch.randn(1, 2, 67, 11, requires_grad=True) for _ in range(2))
    bias = torch.zeros(length, 67)
    bias[0, 1:], bias[-1] = lowest, lowest
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(query, key, value, masks.bias(bias))
        if not clearhead.explain(query, key, value, masks.bias(bias), return_lse=True).reasons[kernel]:
            assert (
                clearhead.attention(query, key, value, masks.bias(bias), return_lse=True)[1][..., -1] == lowest
            ).all()
    output.sum().backward()
    torch.testing.assert_close(output[:, :, -1], value.mean(2))
    assert length == 1 or torch.equal(output[:, :, 0], value[:, :, 0])
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


# Writing to a mask's tensor between forward and backward is refused, or changes no gradient.


B, H, L, S, D = 2, 3, 5, 7, 11
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


# Inputs whose elements share memory: outputs and derivatives against float64.


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


def numbers(kernel: str | None, given: Inputs, leaves: Inputs, **options: Any) -> list[Tensor]:
    """Output, first derivatives, the same under ``create_graph=True``, and second ones."""
    output = attend(*given, kernel=kernel, **options)
    first = derivatives(output, leaves, [sines], retain_graph=True)
    _, *again_and_second = derivatives(output, leaves, (sines, squares))
    return [x.detach() for x in (*first, *again_and_second)]


def copies(given: Inputs) -> Inputs:
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in given)


@functools.cache
def of_copies(name: str, mask: masks.Mask | None, dtype: torch.dtype) -> tuple[Inputs, list[Tensor], list[Tensor]]:
    """Leaves in the dtype, and the derivatives from copies: in float64, and in the dtype."""
    shapes, inputs = SHARED[name]
    exact = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    leaves = tuple(x.detach().to(dtype).requires_grad_() for x in exact)
    expected, reference = (numbers("reference", copies(inputs(*x)), x, mask=mask) for x in (exact, leaves))
    return leaves, expected, reference


@in_turn({"name": SHARED, "kernel": (*KERNELS, None), "mask": [None, masks.causal(), BLIND]}, {"dtype": TOLERANCES})
def test_shared_memory(name: str, mask: masks.Mask | None, kernel: str | None, dtype: torch.dtype) -> None:
    """Differentiated twice, float32 may cost four times the rounding errors that `reference` has of copies, if more."""
    inputs = SHARED[name][1]
    leaves, expected, reference = of_copies(name, mask, dtype)
    try:
        runs = [numbers(kernel, inputs(*leaves), leaves, mask=mask) for _ in range(2)]  # planned, and cached
    except KernelError:
        assert kernel == "sdpa"
        pytest.skip("PyTorch has no fused kernel for this call")
    allowed = TOLERANCES[dtype] * max(1.0, *(float(right.abs().max()) for right in expected[: -len(leaves)]))
    for found in runs:
        for index, (one, other, right) in enumerate(zip(found, reference, expected, strict=True)):
            error, rounding = ((x.double() - right).abs().max() for x in (one, other))
            second = index >= len(found) - len(leaves)
            assert error <= (max(allowed, 4 * rounding) if second else allowed)


@pytest.mark.parametrize("sink_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sink_of_minus_infinity_beside_no_key(dtype: torch.dtype, sink_dtype: torch.dtype) -> None:
    x, sinks = torch.randn(1, 1, 2, 4, dtype=dtype), torch.tensor([-torch.inf], dtype=sink_dtype)
    hidden = torch.zeros(2, 2, dtype=torch.bool)
    for kernel in (None, "chunked", "reference"):
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            output, lse = clearhead.attention(x, x, x, hidden, sinks=sinks, return_lse=True)
        assert not output.any()
        assert bool(lse.isneginf().all())
