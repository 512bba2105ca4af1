"""A mask's `repr`: a small picture that never builds L × S and never fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clearhead import masks
from clearhead.masks import Mask

LONG = 100_000


def same_parity(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k) % 2 == 0


def triangle(size: int) -> str:
    return " ".join("■" * (row + 1) + "·" * (size - 1 - row) for row in range(size))


PICTURES = [
    (masks.keep(torch.tensor([[1, 0, 1], [0, 0, 1]])), "keep((2, 3))", "■·■ ··■"),
    (masks.drop(torch.tensor([[1, 0, 1], [0, 0, 1]])), "drop((2, 3))", "·■· ■■·"),
    (masks.bias(torch.tensor([[0.0, -torch.inf], [-1e9, 2.0]])), "bias((2, 2))", "■· ■■"),
    (masks.documents(torch.tensor([4, 4, 1])) & masks.causal(), "documents((1, 3)) & causal()", "■·· ■■· ··■"),
    (
        masks.keep(torch.tensor([[0, 0, 1, 1]])) & (masks.causal("bottom_right") | masks.prefix(3)),
        "keep((1, 4)) & (causal('bottom_right') | prefix(3))",
        "··■· ··■· ··■· ··■■",
    ),
    (masks.lengths(torch.tensor([[1, 2], [3, 0]])), "lengths((2, 2)), item 0 of 2, head 0 of 1", "■·· ■■·"),
    (
        ~(masks.causal() & masks.sliding_window(1, 0)) & masks.keep(torch.ones(4, 4)),
        "~(causal() & sliding_window(1, 0)) & keep((4, 4))",
        "·■■■ ··■■ ■··■ ■■··",
    ),
    (
        masks.keep(torch.eye(3).expand(2, 5, 3, 3)),
        "keep((2, 5, 3, 3)), item 0 of 2, head 0 of 5",
        "■·· ·■· ··■",
    ),
    (masks.keep(torch.ones(23, 23).tril()), "keep((23, 23)), 12 of 23 queries × 12 of 23 keys", triangle(12)),
    (masks.causal(), "causal()", triangle(8)),  # a mask that fits any length is drawn for eight
    (masks.mask_mod(same_parity), "mask_mod(same_parity)", "■·■·■·■· ·■·■·■·■ " * 3 + "■·■·■·■· ·■·■·■·■"),
    (
        masks.documents(torch.arange(LONG) // (LONG // 2)),
        f"documents((1, {LONG})), 12 of {LONG} queries × 12 of {LONG} keys",
        "■■■■■■······ " * 6 + "······■■■■■■ " * 6,
    ),
]


@pytest.mark.parametrize(("mask", "title", "picture"), PICTURES, ids=range(len(PICTURES)))
def test_the_picture(mask: Mask, title: str, picture: str) -> None:
    assert repr(mask).splitlines() == [f"<mask {title}", *(f"  {row}" for row in picture.split()), ">"]


class LargestResult(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation produced."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


MANY_KEYS = masks.keep(keys=torch.ones(2, LONG, dtype=torch.bool))
LONG_MASKS = [
    ~masks.causal("bottom_right") & MANY_KEYS,
    (masks.causal() | masks.prefix(torch.tensor([7, 9]))) & MANY_KEYS,
    masks.mask_mod(same_parity) & MANY_KEYS,
    masks.lengths(torch.arange(LONG)[None]),
    masks.bias(torch.zeros(LONG, 1)) & masks.bias(torch.zeros(1, LONG)),
    ~masks.documents(torch.arange(LONG)),
]


@pytest.mark.parametrize("mask", LONG_MASKS, ids=range(len(LONG_MASKS)))
def test_a_long_mask_is_sampled_never_built(mask: Mask) -> None:
    with LargestResult() as largest:
        text = repr(mask)
    assert largest.elements <= 4 * LONG  # views of the mask's tensors; L × S would be 10¹⁰
    assert f"12 of {LONG}" in text.splitlines()[0]
    assert "cannot be drawn" not in text
    assert len(text.splitlines()) == 14
    assert len(text) < 400


def failing(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    raise KeyError("a bug in the predicate")


HOPELESS: list[Callable[[], Mask]] = [
    lambda: masks.keep(torch.ones(2, 3)) & masks.keep(torch.ones(3, 3)),
    lambda: masks.mask_mod(failing),
    lambda: masks.mask_mod(lambda b, h, q, k: torch.ones(5, 5, 5, 5, 5, dtype=torch.bool)),
    lambda: masks.keep(torch.ones(2, 2, device="meta", dtype=torch.bool)),
    lambda: masks.lengths(torch.tensor([5, 5])) & masks.keep(keys=torch.ones(2, 3)),
]


@pytest.mark.parametrize("make", HOPELESS, ids=range(len(HOPELESS)))
def test_a_mask_that_cannot_be_drawn_says_why(make: Callable[[], Mask]) -> None:
    text = repr(make())
    assert text.startswith("<mask ")
    assert "cannot be drawn, " in text
    assert text.endswith(">")


EMPTY = [
    masks.keep(torch.ones(3, 0)),
    masks.keep(keys=torch.ones(0, 3)),
    masks.lengths(torch.zeros(0, dtype=torch.int64)),
    masks.documents(torch.zeros(0, dtype=torch.int64)),
    masks.bias(torch.zeros(2, 0, 3, 3)),
]


@pytest.mark.parametrize("mask", EMPTY, ids=lambda mask: mask.describe())
def test_sizes_of_zero_do_not_break_it(mask: Mask) -> None:
    assert repr(mask).startswith(f"<mask {mask.describe()}")
