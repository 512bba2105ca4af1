"""No kernel but `reference` ever holds the whole score matrix, whatever the mask, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

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


# What a mask rules out is not computed: `chunked` multiplies little more than what queries see, backward too.


KV_HEADS = 2
LONG = 1511
FORWARD, BACKWARD = 2, 5  # matrix products of rows × columns × head size

SPARSE: dict[str, Callable[[int], masks.Mask]] = {
    "window": lambda n: masks.sliding_window(53, 11),
    "causal window": lambda n: masks.causal() & masks.sliding_window(101, 0),
    "window of one": lambda n: masks.sliding_window(0, 0),
    "prefix": lambda n: masks.prefix(67),
    "prefix or causal": lambda n: masks.causal() | masks.prefix(67),
    "prefix and window": lambda n: masks.sliding_window(0, 0) & masks.prefix(67),
    "documents": lambda n: masks.documents(torch.arange(n) // 97),
    "documents of many lengths": lambda n: masks.documents((torch.arange(n) / 3).sqrt().long()),
    "documents of two items": lambda n: masks.documents(torch.arange(n).expand(2, n) // torch.tensor([[97], [89]])),
    "causal documents": lambda n: masks.documents(torch.arange(n) // 97) & masks.causal(),
    "windows in documents": lambda n: masks.documents(torch.arange(n) // 499) & masks.sliding_window(29, 29),
}


def touched(mask: masks.Mask | None, length: int = LONG, count: int = LONG, *, grad: bool, **options: object) -> float:
    """How many cells of one head's score matrix the matrix products went over."""
    sizes = ((HEADS, length), (KV_HEADS, count), (KV_HEADS, count))
    inputs = [torch.randn(2, *size, HEAD_DIM, requires_grad=grad) for size in sizes]
    with clearhead.use_kernel("chunked"), FlopCounterMode(display=False) as counter:
        output = clearhead.attention(*inputs, mask, **options)
        if grad:
            output.sum().backward()
    products = FORWARD + (BACKWARD if grad else 0)
    return counter.get_total_flops() / (products * 2 * HEAD_DIM * 2 * HEADS)


def seen(mask: masks.Mask, length: int = LONG) -> int:
    """How many cells of one head's score matrix the mask shows in some item."""
    return int(mask.dense(length, length).any(0).sum())


either = pytest.mark.parametrize("grad", [False, True], ids=["forward", "forward and backward"])


@either
@pytest.mark.parametrize("name", SPARSE)
def test_a_mask_costs_what_it_shows(name: str, grad: bool) -> None:
    mask = SPARSE[name](LONG)
    # Blocks of 64 rows at least, each as wide as all its rows together see.
    assert touched(mask, grad=grad) <= 2 * seen(mask) + 64 * LONG


@either
def test_causal_costs_little_more_than_half(grad: bool) -> None:
    assert touched(masks.causal(), grad=grad) < 0.65 * LONG**2
    assert touched(None, grad=grad) == LONG**2


@either
def test_positions_that_count_up_are_skipped_by_too(grad: bool) -> None:
    """A part of the queries, as a chunk of a prefill has."""
    mask = masks.causal() & masks.sliding_window(60, 0)
    assert touched(mask, 31, LONG, grad=grad, query_positions=1000) <= 31 * (60 + 31)
