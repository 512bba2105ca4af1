"""Autocast, activation checkpointing and `torch.func.functional_call`: as PyTorch's own attention behaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from tests.support.attending import attend

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
autocast_to = pytest.mark.parametrize("to", DTYPES[2:], ids=str)
kernels = pytest.mark.parametrize("kernel", [None, "chunked", "reference"])


@autocast_to
@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_those_of_pytorchs_attention(kernel: str | None, dtype: torch.dtype, to: torch.dtype) -> None:
    ours, theirs = (torch.ones(2, 3, 7, 5, dtype=dtype, requires_grad=True) for _ in range(2))
    with torch.autocast("cpu", dtype=to):
        output = attend(ours, ours, ours, kernel=kernel)
        expected = F.scaled_dot_product_attention(theirs, theirs, theirs)
    assert output.dtype == expected.dtype
    output.sum().backward()
    assert ours.grad.dtype == dtype


@kernels
def test_mixed_dtypes_are_brought_together(kernel: str | None) -> None:
    """A float32 query with a bfloat16 cache is an error, but not under autocast."""
    query, cached = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 11, 5, dtype=torch.bfloat16)
    with pytest.raises(clearhead.errors.DTypeError, match="key: expected query's dtype"):
        attend(query, cached, cached, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(query, cached, cached, kernel=kernel).dtype == torch.bfloat16


@kernels
def test_numbers_are_those_of_half_inputs(kernel: str | None) -> None:
    query, key, value = (torch.randn(2, 3, 7, 5) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(query, key, value, masks.causal(), kernel=kernel)
    expected = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), masks.causal(), kernel=kernel)
    assert torch.equal(output, expected)


def test_scores_stay_in_float32() -> None:
    """What autocast would make of a matrix product inside a kernel: scores rounded to bfloat16."""
    x = torch.randn(2, 3, 7, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, lse = clearhead.attention(x, x, x, return_lse=True)
        weights = clearhead.attention_weights(x, x)
    rounded = x.bfloat16().double()
    expected = (rounded @ rounded.mT / 8).logsumexp(-1)
    assert lse.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 7), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", [None, "chunked"])
@pytest.mark.parametrize("forward_inside", [True, False])
def test_backward_inside_autocast_is_that_outside(forward_inside: bool, kernel: str | None) -> None:
    x = torch.randn(2, 3, 7, 5, requires_grad=True)
    bias = torch.randn(7, 7, requires_grad=True)

    def gradients(*, inside: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_inside):
            loss = attend(x, x, x, masks.bias(bias), kernel=kernel).float().square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return torch.autograd.grad(loss, (x, bias))

    for found, expected in zip(gradients(inside=True), gradients(inside=False), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@kernels
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": masks.causal()}, {"dropout_p": 0.4}, {"softcap": 2.0, "dropout_p": 0.1}],
    ids=lambda options: "+".join(options) or "plain",
)
def test_checkpointing_changes_no_gradient(kernel: str | None, options: dict[str, object], reentrant: bool) -> None:
    inputs = [torch.randn(2, 3, 7, 5, requires_grad=True) for _ in range(3)]

    call = partial(attend, kernel=kernel, **options)
    found, expected = gradients_of(inputs, call, reentrant), gradients_of(inputs, call, None)
    assert all(map(torch.equal, found, expected))


def gradients_of(inputs: list[Tensor], function: Callable[..., Tensor], reentrant: bool | None) -> tuple[Tensor, ...]:
    """Gradients under one seed, checkpointed or (``None``) not; the random state differs when backward runs."""
    torch.manual_seed(11)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves) if reentrant is None else checkpoint(function, *leaves, use_reentrant=reentrant)
    torch.rand(5)
    output.square().sum().backward()
    return tuple(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kernel", [None, "sdpa", "chunked", "reference"])
def test_checkpointing_lets_go_of_the_activations(kernel: str | None, reentrant: bool) -> None:
    """Between forward and backward nothing may keep the query, or checkpointing would save no memory."""
    queries: list[weakref.ref[Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        query = 2 * x
        queries.append(weakref.ref(query))
        return attend(query, query, query, masks.sliding_window(2, 2), kernel=kernel)

    x = torch.randn(2, 3, 7, 5, requires_grad=True)
    output = checkpoint(layer, x, use_reentrant=reentrant)
    gc.collect()
    assert queries[0]() is None
    output.sum().backward()
    assert len(queries) == 2, "it ran again"
