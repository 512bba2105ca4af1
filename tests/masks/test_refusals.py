"""The errors of masks, when they are made and at the call, and their words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import attention, masks
from clearhead.errors import ArgumentError, ClearheadError, DeviceError, DTypeError, MaskTypeError, ShapeError
from tests.support.refusals import Call, Refusal, require_text, require_words

Q, K = torch.zeros(2, 6, 5, 8), torch.zeros(2, 3, 7, 8)
META = torch.ones(5, 7, dtype=torch.bool, device="meta")


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def at_call(mask: Any, **positions: Tensor) -> Call:
    return lambda: attention(Q, K, K, mask, **positions)


def at_ids(position: int) -> Call:
    return at_call(masks.documents(ints(9)), query_positions=ints(5) + position)


def queries(lengths: Any, count: int = 4) -> Call:
    return lambda: masks.lengths(torch.tensor([3, 3]), torch.tensor(lengths)).dense(count, 3, batch_size=2)


KEEP, FITS, PER_ITEM = "mask keep(...)", "(B, H, L, S) = (2, 6, 5, 7)", "Give one number per batch item."
ONE, DIMS = "one tensor, either positional (L, S …) or keys= (B, S)", "2 to 4 dimensions, ending in (L, S)"
LENGTHS, DOCUMENTS, MOD = "mask lengths(...)", "mask documents(...)", "mask mask_mod(fn)"
SELECTED, LISTS = (
    "mask selected(...)",
    "(B or 1, L, k) or (B or 1, heads, L, k) with B = 2, L = 5 and heads that divide H = 6",
)

REFUSED = [
    ("a word", at_call("causal"), MaskTypeError, "mask", "a mask from clearhead.masks", "str. For example masks."),
    ("bool, no fit", at_call(torch.ones(4, 7).bool()), ShapeError, KEEP, FITS, "(4, 7)."),
    ("heads", at_call(masks.keep(torch.ones(1, 3, 5, 7))), ShapeError, KEEP, FITS, "(1, 3, 5, 7)."),
    ("first of three", at_call(masks.keep(torch.ones(5, 5, 7))), ShapeError, KEEP, FITS, "(5, 5, 7)."),
    ("inside", at_call(masks.causal() | ~masks.keep(torch.ones(4, 7))), ShapeError, KEEP, FITS, "(4, 7)."),
    ("device", at_call(META), DeviceError, KEEP, "query's device cpu", "meta. Move it with"),
    ("keys", at_call(masks.keep(keys=ints(2, 5))), ShapeError, "mask keep(keys=...)", "(2, 7)", "(2, 5). Marks"),
    ("lengths, B", at_call(masks.lengths(ints(3))), ShapeError, LENGTHS, "(2,) or (2, 5)", f"(3,). {PER_ITEM}"),
    ("lengths, L", at_call(masks.lengths(ints(2, 7))), ShapeError, LENGTHS, "(2,) or (2, 5)", f"(2, 7). {PER_ITEM}"),
    ("prefixes, B", at_call(masks.prefix(ints(3))), ShapeError, "mask prefix(...)", "(2,)", f"(3,). {PER_ITEM}"),
    ("ids, T", at_call(masks.documents(ints(5))), ShapeError, DOCUMENTS, "L = 5 and S = 7", "5 ids. For quer"),
    ("ids, B", at_call(masks.documents(ints(3, 5))), ShapeError, DOCUMENTS, "(T,) or (2, T)", "(3, 5)."),
    ("beyond the ids", at_ids(9), ArgumentError, DOCUMENTS, "positions from 0 to 8", "positions from 9 to 9 in query"),
    ("before the ids", at_ids(-1), ArgumentError, DOCUMENTS, "positions from 0 to 8", "positions from -1 to -1 in"),
    ("lists, L", at_call(masks.selected(ints(2, 4, 1))), ShapeError, SELECTED, LISTS, "(2, 4, 1). Each query"),
    ("lists, B", at_call(masks.selected(ints(3, 5, 1))), ShapeError, SELECTED, LISTS, "(3, 5, 1). Each query"),
    ("lists, H", at_call(masks.selected(ints(2, 4, 5, 1))), ShapeError, SELECTED, LISTS, "(2, 4, 5, 1). Each"),
    ("no heads", at_call(masks.selected(ints(2, 0, 5, 1))), ShapeError, SELECTED, LISTS, "(2, 0, 5, 1). Each"),
    ("no key", at_call(masks.selected(ints(2, 5, 1) + 7)), ArgumentError, SELECTED, "0 to 6 of the 7 keys", "7. Num"),
    (
        "no block",
        at_call(masks.selected(ints(2, 5, 1) + 3, block=3)),
        ArgumentError,
        SELECTED,
        "2 of the 3 blocks",
        "3.",
    ),
    ("below none", at_call(~masks.selected(ints(2, 5, 1) - 2)), ArgumentError, SELECTED, "−1 for none", "-2. Numbers"),
    ("listed floats", lambda: masks.selected(Q), DTypeError, "indices", "an int32 or int64 tensor", "torch.float32."),
    (
        "listed bools",
        lambda: masks.selected(Q.bool()),
        DTypeError,
        "indices",
        "int32 or int64",
        "torch.bool. A bool mask",
    ),
    (
        "bare lists",
        lambda: masks.selected(ints(5, 1)),
        ShapeError,
        "indices",
        "(B or 1, L, k) or",
        "(5, 1). Lists of one",
    ),
    ("empty blocks", lambda: masks.selected(ints(1, 5, 1), block=0), ArgumentError, "block", "an int ≥ 1", "0."),
    ("no bools", at_call(masks.mask_mod(lambda b, h, q, k: q)), DTypeError, MOD, "bool", "a torch.int64 tensor. "),
    ("rows", at_call(masks.mask_mod(lambda *_: META[None, None, 1:])), ShapeError, MOD, "fn", "(1, 1, 4, 7)."),
    ("corner", lambda: masks.causal("left"), ArgumentError, "align", "'top_left' or 'bottom_right'", "'left'."),
    ("left of zero", lambda: masks.sliding_window(-1, 0), ArgumentError, "left", "an int ≥ 0", "-1. For no limit on"),
    ("right of zero", lambda: masks.sliding_window(0, -1), ArgumentError, "right", "an int ≥ 0", "-1."),
    ("half a window", lambda: masks.sliding_window(0, 1.5), DTypeError, "right", "an int ≥ 0", "1.5."),
    ("bool window", lambda: masks.sliding_window(True, 0), DTypeError, "left", "an int ≥ 0", "True."),
    ("prefix -1", lambda: masks.prefix(-1), ArgumentError, "n", "an int ≥ 0", "-1."),
    ("prefixes -3", lambda: masks.prefix(ints(2) - 3), ArgumentError, "n", "numbers ≥ 0", "a smallest one of -3."),
    ("scalar prefix", lambda: masks.prefix(ints()), ShapeError, "n", "an int or a (B,) tensor", "()."),
    ("float prefix", lambda: masks.prefix(torch.ones(2)), DTypeError, "n", "an integer tensor", "torch.float32."),
    ("lengths -2", lambda: masks.lengths(ints(2) - 2), ArgumentError, "key_lengths", "≥ 0", "a smallest one of -2."),
    ("queries -1", queries([3, -1]), ArgumentError, "query_lengths", "numbers ≥ 0", "a smallest one of -1."),
    ("2-D queries", queries([[3, 3]]), ShapeError, "query_lengths", "shape (B,)", "(1, 2)."),
    ("float queries", queries([3.0, 3.0]), DTypeError, "query_lengths", "an integer tensor", "torch.float32."),
    ("beyond L", queries([3, 1], 2), ArgumentError, LENGTHS, "query_lengths of at most L = 2", "a length of 3."),
    ("queries, B", queries([1, 1, 1]), ShapeError, LENGTHS, "query_lengths of shape (2,)", "(3,)."),
    ("list", lambda: masks.lengths([1, 2]), DTypeError, "key_lengths", "(B,) or (B, L)", "list. Write masks.lengths("),
    ("bool lengths", lambda: masks.lengths(META), DTypeError, "key_lengths", "integer", "torch.bool. Marks of 0 and 1"),
    ("3-D lengths", lambda: masks.lengths(ints(2, 3, 5)), ShapeError, "key_lengths", "(B,) or (B, L)", "(2, 3, 5)."),
    ("list of ids", lambda: masks.documents([0, 1]), DTypeError, "ids", "an integer tensor", "list."),
    ("float ids", lambda: masks.documents(torch.ones(3)), DTypeError, "ids", "an integer tensor", "torch.float32."),
    ("no block", lambda: masks.block_causal(0), ArgumentError, "size", "an int ≥ 1", "0."),
    ("half a block", lambda: masks.block_causal(1.5), DTypeError, "size", "an int ≥ 1", "1.5."),
    ("late parent", lambda: masks.tree(torch.tensor([[-1, 1]])), ArgumentError, "parents", "before node 1", "1. List"),
    ("parent -2", lambda: masks.tree(ints(2) - 2), ArgumentError, "parents", "−1 or a node before node 0", "-2."),
    ("float tree", lambda: masks.tree(torch.ones(2)), DTypeError, "parents", "an integer tensor", "torch.float32."),
    ("3-D tree", lambda: masks.tree(ints(1, 1, 3)), ShapeError, "parents", "(N,) or (B, N)", "(1, 1, 3)."),
    ("tree, S", at_call(masks.tree(ints(9) - 1)), ShapeError, "mask tree(...)", "at least 9 keys", "S = 7. The nodes"),
    ("tree, B", at_call(masks.tree(ints(3, 5) - 1)), ShapeError, "mask tree(...)", "(N,) or (2, N)", "(3, 5)."),
    ("3-D ids", lambda: masks.documents(ints(1, 1, 3)), ShapeError, "ids", "shape (T,) or (B, T)", "(1, 1, 3)."),
    ("no predicate", lambda: masks.mask_mod(3), DTypeError, "fn", "a function of (b, h, q, k)", "int."),
    ("both", lambda: masks.keep(ints(2, 2), keys=ints(2, 2)), MaskTypeError, "masks.keep", ONE, "both."),
    ("neither", lambda: masks.drop(), MaskTypeError, "masks.drop", ONE, "none."),
    ("1-D", lambda: masks.keep(torch.ones(7)), ShapeError, "masks.keep", DIMS, "(7,). One mark per key is t[None]."),
    ("5-D", lambda: masks.bias(torch.ones(1, 1, 1, 1, 1)), ShapeError, "masks.bias", DIMS, "(1, 1, 1, 1, 1)."),
    ("3-D keys", lambda: masks.drop(keys=ints(2, 1, 7)), ShapeError, "masks.drop(keys=...)", "(B, S)", "(2, 1, 7)."),
    ("integer bias", lambda: masks.bias(ints(5, 7)), DTypeError, "bias", "a float tensor", "torch.int64. For 0/1"),
    ("list of bias", lambda: masks.bias([[0.0]]), DTypeError, "bias", "a float tensor", "list. For 0/1 marks"),
    ("marks of 3", lambda: masks.keep(ints(2, 2) + 3), DTypeError, "keep", "0 or 1", "torch.int64 with 3. Lengths go"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_it_is_refused_in_words(case: Refusal) -> None:
    require_words(case)


SHAPES = (
    "expected a shape that broadcasts to (B, H, L, S) = (2, 6, 5, 7): (L, S), (B, L, S), (B·H, L, S) or four sizes, "
    "each 1 or full"
)
TEXTS: dict[str, tuple[Call, str]] = {
    "per key": (
        at_call(masks.drop(torch.ones(2, 7))),
        f"mask drop(...): {SHAPES}, got (2, 7). If these are marks per key (batch, key), write masks.drop(keys=t).",
    ),
    "transposed": (
        at_call(masks.bias(torch.ones(7, 5))),
        f"mask bias(...): {SHAPES}, got (7, 5). "
        "The last two sizes are exchanged: queries come before keys; transpose it.",
    ),
    "too long": (
        at_call(masks.lengths(torch.tensor([3, 9]))),
        "mask lengths(...): expected lengths of at most S = 7 keys, got a length of 9. "
        "Lengths count keys of this call; cut them, or check that they belong to this batch.",
    ),
    "additive": (
        lambda: masks.keep(torch.tensor([[0.0, -torch.inf]])),
        "keep: expected bool, or numbers that are all 0 or 1, got torch.float32 with -inf. "
        "An additive mask (0 and −inf) goes into masks.bias(t).",
    ),
    "numbers": (
        at_call(torch.zeros(5, 7)),
        "mask: expected a mask or a bool tensor (True = may attend), got a torch.float32 tensor of shape (5, 7). "
        "Say what its numbers mean: masks.bias(t) adds them to the scores, masks.keep(t) reads 1 as visible, "
        "masks.drop(t) reads 1 as hidden.",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_whole_text(name: str) -> None:
    require_text(*TEXTS[name])


def test_advice_that_does_not_apply_is_left_out() -> None:
    refused = {
        "exchanged": lambda: attention(Q, Q, Q, masks.keep(torch.ones(3, 5, 5))),
        "Use 0 to see nothing": lambda: masks.sliding_window(-1, 0),
        "masks.bias": lambda: masks.keep(ints(2, 2) + 3),
        "(2, 5)": at_call(masks.prefix(ints(3))),  # the shape of lengths per query
    }
    for advice, call in refused.items():
        with pytest.raises(ClearheadError) as caught:
            call()
        assert advice not in str(caught.value)
