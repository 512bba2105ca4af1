"""`mask.check` finds common mistakes, in words, and reports nothing about ordinary masks."""

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


def test_queries_that_see_nothing_are_counted_and_the_first_is_named() -> None:
    marks = torch.ones(2, L, S)
    marks[1, 3:] = 0
    report = masks.keep(marks).check()
    assert not report.ok
    assert str(report) == (
        "keep((2, 5, 7)):\n  - queries that see no key: 2 (the first: item 1, index 3); their output will be zero"
    )
    text = findings(masks.causal() & masks.keep(keys=LEFT_PADDED), S)
    assert "queries that see no key: 6 (the first: item 1, index 0)" in text


def test_keys_that_no_query_sees_are_counted_and_the_first_is_named() -> None:
    text = "keys that no query sees: 1 (the first: item 0, index 6); fine for padding"
    assert findings(masks.sliding_window(0, 1), L, S) == text


@pytest.mark.parametrize("padded", [RIGHT_PADDED, LEFT_PADDED], ids=["right", "left"])
@pytest.mark.parametrize("causal", [False, True], ids=["padding", "causal & padding"])
def test_padding_with_the_wrong_polarity_is_named(padded: Tensor, causal: bool) -> None:
    for wrong in (masks.drop(keys=padded), masks.keep(keys=1 - padded), masks.drop(padded[:, None, None].bool())):
        text = findings(masks.causal() & wrong if causal else wrong, S)
        assert "inverted padding: item 0 shows no key at all" in text


def test_the_advice_for_inverted_padding_names_the_other_function() -> None:
    assert "masks.drop(keys=t)" in findings(masks.keep(keys=1 - RIGHT_PADDED), S)
    advice = findings(masks.drop(keys=RIGHT_PADDED), S).split("\n")[0]
    assert "masks.keep(keys=t)" in advice
    assert "masks.drop(keys=t)" not in advice


@pytest.mark.parametrize("size", [2, 64, 65])
def test_an_inverted_causal_mask_is_named_at_any_size(size: int) -> None:
    for text in (findings(~masks.causal(), size, size + 3), findings(masks.keep(torch.ones(size, size).triu(1)))):
        assert "inverted causal mask" in text
        assert "masks.drop(t)" in text


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
    text = findings(masks.causal() & mask if causal else mask, S, S)
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


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (masks.lengths(torch.tensor([1, 9])), "at most S = 7 keys, got a length of 9"),
        (masks.documents(torch.zeros(6, dtype=torch.int64)), "got 6 ids"),
        (masks.keep(keys=torch.ones(3, S)), "expected (B, S) = (2, 7), got (3, 7)"),
        (masks.keep(torch.ones(2, S)), "got (2, 7). If these are marks per key (batch, key), write masks.keep(keys=t)"),
        (masks.keep(torch.ones(S, L)), "got (7, 5). The last two sizes are exchanged"),
        (masks.bias(torch.zeros(2, S)), "numbers per key (batch, key), give them as t[:, None, None, :]"),
        (masks.causal() & masks.keep(torch.ones(4, S)), "got (4, 7)"),
        (masks.causal() | masks.keep(torch.ones(4, S)), "got (4, 7)"),
        (~masks.keep(torch.ones(4, S)), "got (4, 7)"),
        (masks.mask_mod(lambda b, h, q, k: q - k), "fn to return a bool tensor"),
        (masks.mask_mod(lambda b, h, q, k: torch.ones(1, 1, L + 1, S).bool()), "mask_mod"),
    ],
    ids=lambda value: value.describe() if isinstance(value, Mask) else "",
)
def test_mistakes_in_shapes_are_findings_not_exceptions(mask: Mask, words: str) -> None:
    text = findings(mask, L, S, batch_size=2)
    assert text.startswith("shape or value: ")
    assert words in text


def test_a_mask_that_fits_any_length_needs_one() -> None:
    with pytest.raises(ArgumentError, match=r"query_length: expected a length, because causal\(\) fits any, got none"):
        masks.causal().check()


def test_positions_are_taken_into_account() -> None:
    given = {"query_positions": torch.tensor([3, 4]), "key_positions": torch.tensor([2, 3, 4])}
    assert masks.sliding_window(2, 0).check(**given).ok
    report = masks.sliding_window(0, 0).check(2, 2, query_positions=torch.tensor([1, 5]))
    assert "queries that see no key: 1 (the first: item 0, index 1)" in "\n".join(report.findings)


def test_a_learned_bias_has_a_device() -> None:
    assert positions.RelativeBias(3, 8, 16, device="meta").dense(5).device.type == "meta"
