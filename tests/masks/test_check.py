"""`mask.check` finds common mistakes, in words, and reports nothing about ordinary masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import masks
from clearhead.errors import ArgumentError
from clearhead.masks import Mask
from tests.support.allocations import Allocations

L, S = 5, 7
RIGHT_PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]])
LEFT_PADDED = RIGHT_PADDED.flip(1)
PADDED_FURTHER = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]])  # to a fixed length, no item is full


SIZES = {"query_length": L, "key_length": S, "batch_size": 2}
FOUND: list[tuple[Mask, dict[str, Any], str]] = [
    (masks.causal() & masks.keep(keys=LEFT_PADDED), {}, "queries that see no key: 6 (the first: item 1, index 0)"),
    (masks.sliding_window(0, 1), SIZES, "keys that no query sees: 2 (the first: item 0, index 6); fine for padding"),
    (masks.sliding_window(0, 0), {"query_positions": torch.tensor([1, 5]), "key_length": 2}, "see no key: 1 (the fi"),
    (masks.keep(keys=1 - RIGHT_PADDED), {}, "if 1 marks padding in this tensor, use masks.drop(keys=t)"),
    (masks.drop(keys=RIGHT_PADDED), {}, "if 1 marks real keys in this tensor, use masks.keep(keys=t)"),
    (masks.lengths(torch.tensor([1, 9])), SIZES, "shape or value: mask lengths(...): expected lengths of at most"),
    (masks.bias(torch.zeros(2, S)), SIZES, "numbers per key (batch, key), give them as t[:, None, None, :]"),
    (masks.causal() & masks.keep(torch.ones(4, S)), SIZES, "got (4, 7)"),
    (~masks.keep(torch.ones(4, S)), SIZES, "got (4, 7)"),
    (masks.mask_mod(lambda b, h, q, k: q - k), SIZES, "fn to return a bool tensor"),
    (masks.mask_mod(lambda b, h, q, k: torch.ones(1, 1, L + 1, S).bool()), SIZES, "shape or value: mask mask_mod(fn)"),
]


@pytest.mark.parametrize(("mask", "sizes", "text"), FOUND, ids=range(len(FOUND)))
def test_mistakes_are_findings(mask: Mask, sizes: dict[str, Any], text: str) -> None:
    assert text in "\n".join(mask.check(**sizes).findings)


PER_QUERY: dict[str, Callable[[Tensor], Mask]] = {
    "keep": lambda real: masks.keep(real[:, None, :, None]),
    "drop": lambda real: masks.drop(1 - real[:, None, :, None]),
    "bias": lambda real: masks.bias(torch.zeros(3, 1, S, 1).masked_fill(real[:, None, :, None] == 0, -torch.inf)),
    "repeated for every key": lambda real: masks.keep(real[:, :, None].repeat(1, 1, S)),
}


@pytest.mark.parametrize("name", PER_QUERY)
def test_padding_that_hides_queries_alone_is_named(name: str) -> None:
    report = PER_QUERY[name](RIGHT_PADDED).check(S, S, batch_size=3)
    assert report.findings == (
        "queries that see no key: 6 (the first: item 1, index 3); their output will be zero",
        "padding keys that stay visible: 6 (the first: item 1, index 3); the tensor "
        "has one mark per query, which hides no key; if it marks padding, give its marks per key, (B, S): "
        "masks.keep(keys=t)",
    )
    both = PER_QUERY[name](RIGHT_PADDED) & masks.keep(keys=RIGHT_PADDED)
    assert "padding keys that stay visible" not in str(both.check(S, S, batch_size=3))


def test_a_causal_mask_hides_padding_at_the_end() -> None:
    for real, finds in ((RIGHT_PADDED, False), (LEFT_PADDED, True)):
        report = (masks.causal() & masks.keep(real[:, None, :, None])).check(S, S)
        assert ("padding keys that stay visible" in str(report)) == finds


def test_marks_of_queries_in_cross_attention_say_nothing_about_keys() -> None:
    mask = masks.keep(RIGHT_PADDED[:, None, :, None])
    assert "padding keys" not in str(mask.check(S, S + 1))


def test_the_report() -> None:
    marks = torch.ones(2, L, S)
    marks[1, 3:] = 0
    report = masks.keep(marks).check()
    assert not report.ok
    assert str(report) == (
        "keep((2, 5, 7)):\n  - queries that see no key: 2 (the first: item 1, index 3); their output will be zero"
    )


@pytest.mark.parametrize("padded", [RIGHT_PADDED, LEFT_PADDED], ids=["right", "left"])
@pytest.mark.parametrize("causal", [False, True], ids=["padding", "causal & padding"])
def test_padding_with_the_wrong_polarity_is_named(padded: Tensor, causal: bool) -> None:
    for wrong in (masks.drop(keys=padded), masks.keep(keys=1 - padded), masks.drop(padded[:, None, None].bool())):
        report = (masks.causal() & wrong if causal else wrong).check(S)
        assert "inverted padding: item 0 shows no key at all" in str(report)


@pytest.mark.parametrize("size", [2, 64, 65])
def test_an_inverted_causal_mask_is_named_at_any_size(size: int) -> None:
    for report in ((~masks.causal()).check(size, size + 3), masks.keep(torch.ones(size, size).triu(1)).check()):
        assert "inverted causal mask" in str(report)
        assert "masks.drop(t)" in str(report)


@pytest.mark.parametrize(
    "mask",
    [
        masks.keep(keys=PADDED_FURTHER),
        masks.keep(keys=PADDED_FURTHER.flip(1)),
        masks.lengths(torch.tensor([7, 0, 5])),
        masks.lengths(torch.tensor([0, 3])),
    ],
    ids=["right, none full", "left, none full", "one item empty", "one empty, one short"],
)
@pytest.mark.parametrize("causal", [False, True], ids=["padding", "causal & padding"])
def test_ordinary_padding_is_not_called_inverted(mask: Mask, causal: bool) -> None:
    text = str((masks.causal() & mask if causal else mask).check(S, S))
    assert "inverted" not in text
    assert "shape" not in text


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & masks.sliding_window(2, 0),
        masks.causal("bottom_right"),
        masks.causal() | masks.prefix(2),
        masks.documents(torch.tensor([0, 0, 1, 1, 2, 2, 2])),
        masks.keep(torch.ones(S, S).tril()),
        masks.drop(torch.ones(S, S).triu(1)),
        masks.bias(torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)),
        masks.keep(keys=RIGHT_PADDED),
        masks.keep(keys=LEFT_PADDED),
        masks.lengths(torch.tensor([7, 3])),
        masks.mask_mod(lambda b, h, q, k: (q >= k)[0, 0]),  # fewer dimensions broadcast
    ],
    ids=lambda mask: mask.describe(),
)
def test_ordinary_masks_are_ok(mask: Mask) -> None:
    report = mask.check(S, S)
    assert report.ok
    assert str(report) == f"{mask.describe()}: nothing suspicious"


def test_a_mask_that_fits_any_length_needs_one() -> None:
    with pytest.raises(ArgumentError, match=r"query_length: expected a length, because causal\(\) fits any, got none"):
        masks.causal().check()


# A mask's `repr`: a small picture that never builds L × S and never fails.


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
    (masks.keep(torch.eye(3).expand(2, 5, 3, 3)), "keep((2, 5, 3, 3)), item 0 of 2, head 0 of 5", "■·· ·■· ··■"),
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
    with Allocations() as allocated:
        text = repr(mask)
    assert allocated.largest <= 16 * LONG  # bytes of the mask's tensors; L × S would be 10¹⁰
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


NONE = torch.zeros(0, dtype=torch.int64)
EMPTY = [masks.keep(torch.ones(3, 0)), masks.keep(keys=torch.ones(0, 3)), masks.bias(torch.zeros(2, 0, 3, 3))]
EMPTY += [masks.lengths(NONE), masks.documents(NONE)]


@pytest.mark.parametrize("mask", EMPTY, ids=lambda mask: mask.describe())
def test_sizes_of_zero_do_not_break_it(mask: Mask) -> None:
    assert repr(mask).startswith(f"<mask {mask.describe()}")
