"""`mask.check` finds the usual mistakes, in words, and leaves ordinary masks alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead import masks, positions
from clearhead.errors import ArgumentError
from clearhead.masks import Mask

L, S = 5, 7
RIGHT_PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]])
LEFT_PADDED = RIGHT_PADDED.flip(1)
PADDED_FURTHER = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]])  # to a fixed length, no item is full


def findings(mask: Mask, *sizes: int, **more: int) -> str:
    return "\n".join(mask.check(*sizes, **more).findings)


def test_nothing_suspicious() -> None:
    report = (masks.causal() & masks.sliding_window(2, 0)).check(L)
    assert report.ok
    assert report.findings == ()
    assert str(report) == "causal() & sliding_window(2, 0): nothing suspicious"


def test_queries_that_see_nothing_are_counted_and_the_first_is_named() -> None:
    marks = torch.ones(2, L, S)
    marks[1, 3:] = 0
    report = masks.keep(marks).check()
    assert not report.ok
    assert str(report) == (
        "keep((2, 5, 7)):\n  - queries that see no key: 2 (the first: item 1, index 3); their output will be zero"
    )


def test_a_query_that_left_padding_hides_from_a_causal_mask_is_found() -> None:
    text = findings(masks.causal() & masks.keep(keys=LEFT_PADDED), S)
    assert "queries that see no key: 6 (the first: item 1, index 0)" in text


def test_keys_that_nobody_sees_are_counted_and_the_first_is_named() -> None:
    assert (
        findings(masks.sliding_window(0, 1), L, S)
        == "keys that no query sees: 1 (the first: item 0, index 6); fine for padding"
    )


@pytest.mark.parametrize("padded", [RIGHT_PADDED, LEFT_PADDED], ids=["right", "left"])
@pytest.mark.parametrize("causal", [False, True], ids=["padding", "causal & padding"])
def test_padding_given_with_the_wrong_polarity_is_named(padded: Tensor, causal: bool) -> None:
    for wrong in (masks.drop(keys=padded), masks.keep(keys=1 - padded), masks.drop(padded[:, None, None].bool())):
        text = findings(masks.causal() & wrong if causal else wrong, S)
        assert "inverted padding: item 0 shows no key at all" in text


def test_the_advice_for_inverted_padding_names_the_other_spelling() -> None:
    assert "masks.drop(keys=t)" in findings(masks.keep(keys=1 - RIGHT_PADDED), S)
    advice = findings(masks.drop(keys=RIGHT_PADDED), S).split("\n")[0]
    assert "masks.keep(keys=t)" in advice
    assert "masks.drop(keys=t)" not in advice


def test_a_causal_mask_given_with_the_wrong_polarity_is_named() -> None:
    hidden = torch.ones(L, L).triu(1)
    text = findings(masks.keep(hidden))
    assert "inverted causal mask" in text
    assert "masks.drop(t)" in text
    assert "inverted" not in findings(masks.drop(hidden))


@pytest.mark.parametrize("size", [2, 3, 64, 65, 200])
def test_an_inverted_causal_mask_is_found_at_any_size(size: int) -> None:
    assert "inverted causal mask" in findings(~masks.causal(), size)
    assert "inverted causal mask" in findings(~masks.causal(), size, size + 3)


@pytest.mark.parametrize(
    "mask",
    [
        masks.keep(keys=RIGHT_PADDED),
        masks.keep(keys=LEFT_PADDED),
        masks.keep(keys=PADDED_FURTHER),
        masks.keep(keys=PADDED_FURTHER.flip(1)),
        masks.lengths(torch.tensor([7, 3, 5])),
        masks.lengths(torch.tensor([7, 0, 5])),
    ],
    ids=["right", "left", "right, none full", "left, none full", "lengths", "one item empty"],
)
@pytest.mark.parametrize("causal", [False, True], ids=["padding", "causal & padding"])
def test_ordinary_padding_is_not_called_inverted(mask: Mask, causal: bool) -> None:
    text = findings(masks.causal() & mask if causal else mask, S, S)
    assert "inverted" not in text
    assert "shape" not in text


def test_an_empty_item_among_short_ones_is_not_called_inverted() -> None:
    assert "inverted" not in findings(masks.lengths(torch.tensor([0, 3])), L, S)


def test_an_ordinarily_padded_batch_is_ok() -> None:
    assert masks.keep(keys=RIGHT_PADDED).check(S).ok
    assert masks.keep(keys=LEFT_PADDED).check(S).ok
    assert masks.lengths(torch.tensor([7, 3])).check(S).ok


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.causal("bottom_right"),
        masks.sliding_window(1, 1),
        masks.causal() | masks.prefix(2),
        masks.documents(torch.tensor([0, 0, 1, 1, 2, 2, 2])),
        masks.keep(torch.ones(S, S).tril()),
        masks.drop(torch.ones(S, S).triu(1)),
        masks.bias(torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)),
    ],
    ids=lambda mask: mask.describe(),
)
def test_ordinary_masks_are_ok(mask: Mask) -> None:
    assert mask.check(S, S).findings == ()


def test_marks_per_key_given_without_saying_so() -> None:
    text = findings(masks.keep(torch.ones(2, S)), L, S, batch_size=2)
    assert text.startswith("shape or value: mask keep(...): expected a shape that broadcasts to (B, H, L, S)")
    assert "got (2, 7). If these are marks per key (batch, key), write masks.keep(keys=t)." in text


def test_queries_and_keys_exchanged() -> None:
    text = findings(masks.keep(torch.ones(S, L)), L, S)
    assert "got (7, 5). The last two sizes are exchanged" in text


def test_a_wrong_batch_is_not_blamed_on_the_last_two_sizes() -> None:
    text = findings(masks.keep(torch.ones(7, L, L)), L, L, batch_size=2, num_heads=2)
    assert "got (7, 5, 5)" in text
    assert "exchanged" not in text


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (masks.lengths(torch.tensor([1, 9])), "at most S = 7 keys, got a length of 9"),
        (masks.lengths(torch.tensor([1, 2, 3])), "expected shape (2,) or (2, 5), got (3,)"),
        (masks.documents(torch.zeros(6, dtype=torch.int64)), "got 6 ids"),
        (masks.keep(keys=torch.ones(3, S)), "expected (B, S) = (2, 7), got (3, 7)"),
        (masks.bias(torch.zeros(2, S)), "numbers per key (batch, key), give them as t[:, None, None, :]"),
        (masks.causal() & masks.keep(torch.ones(4, S)), "got (4, 7)"),
        (masks.causal() | masks.keep(torch.ones(4, S)), "got (4, 7)"),
        (~masks.keep(torch.ones(4, S)), "got (4, 7)"),
    ],
    ids=["too long", "other batch", "documents", "keys", "bias", "and", "or", "not"],
)
def test_shape_mistakes_are_findings_not_exceptions(mask: Mask, says: str) -> None:
    text = findings(mask, L, S, batch_size=2)
    assert text.startswith("shape or value: ")
    assert says in text


def test_a_predicate_of_the_wrong_shape_or_dtype_is_a_finding() -> None:
    assert "fn to return a bool tensor" in findings(masks.mask_mod(lambda b, h, q, k: q - k), L, S)
    assert "mask_mod" in findings(masks.mask_mod(lambda b, h, q, k: torch.ones(1, 1, L + 1, S).bool()), L, S)


def test_a_predicate_may_return_fewer_dimensions() -> None:
    mask = masks.mask_mod(lambda b, h, q, k: (q >= k)[0, 0])
    assert mask.check(L, L, batch_size=2).ok


def test_a_mask_that_fits_any_length_asks_for_one() -> None:
    with pytest.raises(ArgumentError, match=r"query_length: expected a length, because causal\(\) fits any, got none"):
        masks.causal().check()


def test_positions_are_taken_into_account() -> None:
    positions = {"query_positions": torch.tensor([3, 4]), "key_positions": torch.tensor([2, 3, 4])}
    assert masks.sliding_window(2, 0).check(**positions).ok
    assert "queries that see no key: 1 (the first: item 0, index 1)" in "\n".join(
        masks.sliding_window(0, 0).check(2, 2, query_positions=torch.tensor([1, 5])).findings
    )


def test_a_learnt_bias_says_its_device() -> None:
    assert positions.RelativeBias(3, 8, 16, device="meta").dense(5).device.type == "meta"
