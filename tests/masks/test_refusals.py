"""What masks refuse, where they are made and at the call, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import attention, masks
from clearhead.errors import ArgumentError, DeviceError, DTypeError, MaskTypeError, ShapeError
from tests.support.refusals import Call, Refusal, require_fix, require_text, require_words

Q, K = torch.zeros(2, 6, 5, 8), torch.zeros(2, 3, 7, 8)
META = torch.ones(5, 7, dtype=torch.bool, device="meta")


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def at_call(mask: Any, **positions: Tensor) -> Call:
    return lambda: attention(Q, K, K, mask, **positions)


KEEP, FITS = "mask keep(...)", "(B, H, L, S) = (2, 6, 5, 7)"
ONE, DIMS = "one tensor, either positional (L, S …) or keys= (B, S)", "2 to 4 dimensions, ending in (L, S)"
TOO_LONG = masks.lengths(torch.tensor([3, 9]))

REFUSED = [
    (
        "a word",
        at_call("causal"),
        MaskTypeError,
        "mask",
        "a mask from clearhead.masks",
        "str. For example masks.causal()",
    ),
    (
        "numbers",
        at_call(Q[0, 0]),
        MaskTypeError,
        "mask",
        "a bool tensor",
        "a torch.float32 tensor of shape (5, 8). Say",
    ),
    ("no fit", at_call(masks.keep(torch.ones(4, 7))), ShapeError, KEEP, FITS, "(4, 7)."),
    ("bool, no fit", at_call(torch.ones(4, 7).bool()), ShapeError, KEEP, FITS, "(4, 7)."),
    ("heads", at_call(masks.keep(torch.ones(1, 3, 5, 7))), ShapeError, KEEP, FITS, "(1, 3, 5, 7)."),
    ("first of three", at_call(masks.keep(torch.ones(5, 5, 7))), ShapeError, KEEP, FITS, "(5, 5, 7)."),
    ("inside", at_call(masks.causal() | ~masks.keep(torch.ones(4, 7))), ShapeError, KEEP, FITS, "(4, 7)."),
    ("per key", at_call(torch.ones(2, 7).bool()), ShapeError, KEEP, FITS, "(2, 7). If these are marks per key"),
    ("transposed", at_call(torch.ones(2, 7, 5).bool()), ShapeError, KEEP, FITS, "(2, 7, 5). The last two sizes are"),
    ("device", at_call(META), DeviceError, KEEP, "a tensor on cpu, like query", "one on meta."),
    ("keys", at_call(masks.keep(keys=ints(2, 5))), ShapeError, "mask keep(keys=...)", "(B, S) = (2, 7)", "(2, 5)."),
    ("too long", at_call(TOO_LONG), ArgumentError, "mask lengths(...)", "S = 7 keys", "a length of 9. Lengths count"),
    ("lengths, B", at_call(masks.lengths(ints(3))), ShapeError, "mask lengths(...)", "(2,) or (2, 5)", "(3,)."),
    ("lengths, L", at_call(masks.lengths(ints(2, 7))), ShapeError, "mask lengths(...)", "(2,) or (2, 5)", "(2, 7)."),
    (
        "ids, T",
        at_call(masks.documents(ints(5))),
        ShapeError,
        "mask documents(...)",
        "L = 5 and S = 7",
        "5 ids. For quer",
    ),
    ("ids, B", at_call(masks.documents(ints(3, 5))), ShapeError, "mask documents(...)", "(T,) or (2, T)", "(3, 5)."),
    (
        "no bools",
        at_call(masks.mask_mod(lambda b, h, q, k: q)),
        DTypeError,
        "mask mask_mod(fn)",
        "bool",
        "a torch.int64 tensor. ",
    ),
    ("corner", lambda: masks.causal("left"), ArgumentError, "align", "'top_left' or 'bottom_right'", "'left'."),
    ("left of zero", lambda: masks.sliding_window(-1, 0), ArgumentError, "left", "an int ≥ 0", "-1."),
    ("right of zero", lambda: masks.sliding_window(0, -1), ArgumentError, "right", "an int ≥ 0", "-1."),
    ("half a window", lambda: masks.sliding_window(0, 1.5), DTypeError, "right", "an int ≥ 0", "float."),
    ("bool window", lambda: masks.sliding_window(True, 0), DTypeError, "left", "an int ≥ 0", "bool."),
    ("prefix -1", lambda: masks.prefix(-1), ArgumentError, "n", "an int ≥ 0", "-1."),
    ("prefixes -3", lambda: masks.prefix(ints(2) - 3), ArgumentError, "n", "numbers ≥ 0", "a smallest one of -3."),
    ("scalar prefix", lambda: masks.prefix(ints()), ShapeError, "n", "an int or a (B,) tensor", "()."),
    ("float prefix", lambda: masks.prefix(torch.ones(2)), DTypeError, "n", "an integer tensor", "torch.float32."),
    ("lengths -2", lambda: masks.lengths(ints(2) - 2), ArgumentError, "key_lengths", "≥ 0", "a smallest one of -2."),
    (
        "list",
        lambda: masks.lengths([1, 2]),
        DTypeError,
        "key_lengths",
        "(B,) or (B, L)",
        "list. Write masks.lengths(torch",
    ),
    ("float lengths", lambda: masks.lengths(torch.ones(2)), DTypeError, "key_lengths", "integer", "torch.float32."),
    ("bool lengths", lambda: masks.lengths(ints(2, 7).bool()), DTypeError, "key_lengths", "integer", "torch.bool."),
    ("3-D lengths", lambda: masks.lengths(ints(2, 3, 5)), ShapeError, "key_lengths", "(B,) or (B, L)", "(2, 3, 5)."),
    ("list of ids", lambda: masks.documents([0, 1]), DTypeError, "ids", "an integer tensor", "list."),
    ("float ids", lambda: masks.documents(torch.ones(3)), DTypeError, "ids", "an integer tensor", "torch.float32."),
    ("3-D ids", lambda: masks.documents(ints(1, 1, 3)), ShapeError, "ids", "shape (T,) or (B, T)", "(1, 1, 3)."),
    ("no predicate", lambda: masks.mask_mod(3), DTypeError, "fn", "a function of (b, h, q, k)", "int."),
    ("both", lambda: masks.keep(ints(2, 2), keys=ints(2, 2)), MaskTypeError, "masks.keep", ONE, "both."),
    ("neither", lambda: masks.drop(), MaskTypeError, "masks.drop", ONE, "none."),
    ("1-D", lambda: masks.keep(torch.ones(7)), ShapeError, "masks.keep", DIMS, "(7,)."),
    ("5-D", lambda: masks.bias(torch.ones(1, 1, 1, 1, 1)), ShapeError, "masks.bias", DIMS, "(1, 1, 1, 1, 1)."),
    ("3-D keys", lambda: masks.drop(keys=ints(2, 1, 7)), ShapeError, "masks.drop(keys=...)", "(B, S)", "(2, 1, 7)."),
    (
        "integer bias",
        lambda: masks.bias(ints(5, 7)),
        DTypeError,
        "bias",
        "a float tensor",
        "torch.int64. For 0/1 marks",
    ),
    ("list of bias", lambda: masks.bias([[0.0]]), DTypeError, "bias", "a float tensor", "list. For 0/1 marks"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_it_is_refused_in_words(case: Refusal) -> None:
    require_words(case)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            at_call(masks.drop(torch.ones(2, 7))),
            "mask drop(...): expected a shape that broadcasts to (B, H, L, S) = (2, 6, 5, 7): (L, S), (B, L, S), "
            "(B·H, L, S) or four sizes, each 1 or full, got (2, 7). "
            "If these are marks per key (batch, key), write masks.drop(keys=t).",
        ),
        (
            at_call(masks.bias(torch.ones(7, 5))),
            "mask bias(...): expected a shape that broadcasts to (B, H, L, S) = (2, 6, 5, 7): (L, S), (B, L, S), "
            "(B·H, L, S) or four sizes, each 1 or full, got (7, 5). "
            "The last two sizes are exchanged: queries come before keys; transpose it.",
        ),
        (
            at_call(TOO_LONG),
            "mask lengths(...): expected lengths of at most S = 7 keys, got a length of 9. "
            "Lengths count keys of this call; cut them, or check that they belong to this batch.",
        ),
        (
            lambda: masks.keep(torch.tensor([[0.0, -torch.inf]])),
            "keep: expected bool, or numbers that are all 0 or 1, got torch.float32 with -inf. "
            "An additive mask (0 and −inf) goes into masks.bias(t).",
        ),
        (
            at_call(torch.zeros(5, 7)),
            "mask: expected a mask or a bool tensor (True = may attend), got a torch.float32 tensor of shape (5, 7). "
            "Say what its numbers mean: masks.bias(t) adds them to the scores, masks.keep(t) reads 1 as visible, "
            "masks.drop(t) reads 1 as hidden.",
        ),
    ],
    ids=["per key", "transposed", "too long", "additive", "numbers"],
)
def test_the_whole_text(call: Call, text: str) -> None:
    require_text(call, text)


UNADVISED = ["device", "keys", "lengths, B", "lengths, L", "bool lengths", "1-D"]


@pytest.mark.parametrize("case", [case for case in REFUSED if case[0] in UNADVISED], ids=lambda case: case[0])
def test_a_mismatch_comes_with_the_likely_fix(case: Refusal) -> None:
    require_fix(case)


def test_a_mask_of_square_sizes_is_not_told_to_transpose() -> None:
    with pytest.raises(ShapeError, match=r"got \(3, 5, 5\)") as caught:
        attention(Q, Q, Q, masks.keep(torch.ones(3, 5, 5)))
    assert "exchanged" not in str(caught.value)


def test_a_window_of_minus_one_is_not_answered_with_zero() -> None:
    with pytest.raises(ArgumentError) as caught:
        masks.sliding_window(-1, 0)
    assert "Use 0 to see nothing" not in str(caught.value)
    assert "no limit" in str(caught.value)


def test_whole_numbers_that_are_no_marks_are_not_sent_to_bias() -> None:
    with pytest.raises(DTypeError, match=r"got torch\.int64 with 3\. ") as caught:
        masks.keep(torch.tensor([[3, 2]]))
    assert "masks.bias" not in str(caught.value)


def test_prefixes_are_told_the_shape_they_take() -> None:
    with pytest.raises(ShapeError) as caught:
        at_call(masks.prefix(ints(3)))()
    assert "(2, 5)" not in str(caught.value)


def test_a_predicate_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"^mask mask_mod\(fn\): expected .*got \(1, 1, 4, 7\)"):
        at_call(masks.mask_mod(lambda b, h, q, k: torch.ones(1, 1, 4, 7).bool()))()


@pytest.mark.parametrize("positions", [ints(5) + 9, ints(5) - 1], ids=["beyond", "before"])
def test_positions_without_a_document_are_refused(positions: Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"^mask documents\(\.\.\.\): expected "):
        at_call(masks.documents(ints(9)), query_positions=positions)()
