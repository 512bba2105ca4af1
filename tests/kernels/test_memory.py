"""No kernel but `reference` ever holds the whole score matrix, whatever the mask, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.allocations import Allocations

BATCH, HEADS, HEAD_DIM = 2, 4, 8
LENGTH = 1103
FLOAT = 4  # bytes
SCORES = BATCH * HEADS * LENGTH * LENGTH * FLOAT

MASKS: dict[str, Callable[[int], masks.Mask | None]] = {
    "none": lambda n: None,
    "causal": lambda n: masks.causal(),
    "window": lambda n: masks.sliding_window(31, 7),
    "lengths": lambda n: masks.lengths(torch.tensor([n, n // 2])),
    "padding": lambda n: masks.drop(keys=torch.arange(n).expand(BATCH, n) > n - 5),
    "documents": lambda n: masks.documents(torch.arange(n) // 101) & masks.causal(),
    "where": lambda n: masks.mask_mod(lambda b, h, q, k: (q - k) % 3 == 0),
    "where per head": lambda n: masks.mask_mod(lambda b, h, q, k: (q - k) % (3 + h) == b),
}

mask_names = pytest.mark.parametrize("mask_name", MASKS)


def qkv(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(BATCH, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    return query, key, value


def largest(kernel: str | None, mask: masks.Mask | None, length: int = LENGTH, **options: object) -> int:
    """Bytes of the largest tensor of a forward and backward pass."""
    query, key, value = qkv(length)
    with clearhead.use_kernel(kernel) if kernel else nullcontext(), Allocations(query, key, value) as allocations:
        clearhead.attention(query, key, value, mask, **options).sum().backward()
    return allocations.largest


@pytest.mark.parametrize("kernel", [None, "chunked"], ids=["chosen", "chunked"])
@mask_names
def test_never_holds_the_scores(mask_name: str, kernel: str | None) -> None:
    # Half is above the budget of a block, and of the int64 numbers that a predicate computes with.
    assert largest(kernel, MASKS[mask_name](LENGTH)) < SCORES / 2


@pytest.mark.parametrize(
    "options",
    [{"dropout_p": 0.1}, {"softcap": 20.0}, {"sinks": torch.zeros(HEADS, requires_grad=True)}],
    ids=lambda options: next(iter(options)),
)
def test_chunked_options_never_hold_the_scores(options: dict[str, object]) -> None:
    # Dropout counts in int64, eight bytes for an element.
    assert largest("chunked", None, **options) < SCORES / 3


def test_a_shared_learnt_bias_costs_its_own_size() -> None:
    assert largest("chunked", masks.bias(torch.randn(LENGTH, LENGTH, requires_grad=True))) <= SCORES / BATCH / HEADS


@pytest.mark.parametrize("mask_name", ["none", "causal", "padding", "lengths"])
def test_sdpa_never_holds_the_scores(mask_name: str) -> None:
    """A mask that all heads share may be written out once."""
    assert largest("sdpa", MASKS[mask_name](LENGTH)) <= SCORES / HEADS


def test_reference_does() -> None:
    """The measurement would notice."""
    assert largest("reference", None, 499) >= BATCH * HEADS * 499 * 499 * FLOAT


@mask_names
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_averaged_weights_never_hold_those_of_every_head(mask_name: str, grad: bool) -> None:
    query, key, _ = qkv()
    with torch.set_grad_enabled(grad), Allocations(query, key) as allocations:
        weights = clearhead.attention_weights(query, key, MASKS[mask_name](LENGTH), average_attn_weights=True)
        if grad:
            weights.sum().backward()
    assert allocations.largest <= SCORES / HEADS, allocations.operation


def test_weights_of_a_few_queries_cost_their_rows() -> None:
    query, key, _ = qkv()
    with Allocations(query, key) as allocations:
        clearhead.attention_weights(query, key, masks.causal(), queries=[0, 700, -1]).square().sum().backward()
    assert allocations.largest <= 2 * max(3 * LENGTH, LENGTH * HEAD_DIM) * BATCH * HEADS * FLOAT, allocations.operation
