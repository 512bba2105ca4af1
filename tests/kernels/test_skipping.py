"""What a mask rules out is not computed: `chunked` multiplies little more than what queries see, backward too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead import masks

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTH = 1511
FORWARD, BACKWARD = 2, 5  # matrix products of rows × columns × head size

MASKS: dict[str, Callable[[int], masks.Mask]] = {
    "window": lambda n: masks.sliding_window(53, 11),
    "causal window": lambda n: masks.causal() & masks.sliding_window(101, 0),
    "window of one": lambda n: masks.sliding_window(0, 0),
    "prefix": lambda n: masks.prefix(67),
    "documents": lambda n: masks.documents(torch.arange(n) // 97),
    "documents of many lengths": lambda n: masks.documents((torch.arange(n) / 3).sqrt().long()),
    "documents of two items": lambda n: masks.documents(torch.arange(n).expand(2, n) // torch.tensor([[97], [89]])),
    "causal documents": lambda n: masks.documents(torch.arange(n) // 97) & masks.causal(),
    "windows in documents": lambda n: masks.documents(torch.arange(n) // 499) & masks.sliding_window(29, 29),
}


def touched(
    mask: masks.Mask | None, length: int = LENGTH, count: int = LENGTH, *, grad: bool, **options: object
) -> float:
    """How many cells of one head's score matrix the matrix products went over."""
    sizes = ((HEADS, length), (KV_HEADS, count), (KV_HEADS, count))
    inputs = [torch.randn(2, *size, HEAD_DIM, requires_grad=grad) for size in sizes]
    with clearhead.use_kernel("chunked"), FlopCounterMode(display=False) as counter:
        output = clearhead.attention(*inputs, mask, **options)
        if grad:
            output.sum().backward()
    products = FORWARD + (BACKWARD if grad else 0)
    return counter.get_total_flops() / (products * 2 * HEAD_DIM * 2 * HEADS)


def seen(mask: masks.Mask, length: int = LENGTH) -> int:
    """How many cells of one head's score matrix the mask shows in some item."""
    return int(mask.dense(length, length).any(0).sum())


either = pytest.mark.parametrize("grad", [False, True], ids=["forward", "forward and backward"])


@either
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_costs_what_it_shows(name: str, grad: bool) -> None:
    mask = MASKS[name](LENGTH)
    # Blocks of 64 rows at least, each as wide as all its rows together see.
    assert touched(mask, grad=grad) <= 2 * seen(mask) + 64 * LENGTH


@either
def test_causal_costs_little_more_than_half(grad: bool) -> None:
    assert touched(masks.causal(), grad=grad) < 0.65 * LENGTH**2
    assert touched(None, grad=grad) == LENGTH**2


@either
def test_positions_that_count_up_are_skipped_by_too(grad: bool) -> None:
    """A part of the queries, as a chunk of a prefill has."""
    mask = masks.causal() & masks.sliding_window(60, 0)
    assert touched(mask, 31, LENGTH, grad=grad, query_positions=1000) <= 31 * (60 + 31)
