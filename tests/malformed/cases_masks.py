"""Masks: making them, looking at them, and calls with them."""

from __future__ import annotations

from typing import Any

import torch

import clearhead
from clearhead import masks
from tests.malformed.calls import Call, case
from tests.malformed.values import users_own

LETTERS = {"batch_size": ("B", "batch"), "num_heads": "H", "query_length": "L", "key_length": "S"}
LENGTHS = torch.tensor([3, 5])
MARKS: dict[str, Any] = {"tensor": ("keep", "mask"), "keys": ("keep", "mask")}


def _used(mask: masks.Mask) -> Any:
    """Print a mask, check it, and attend with it."""
    x = torch.randn(2, 3, 5, 4)
    repr(mask)
    report = mask.check(5, 5, batch_size=2, num_heads=3)
    return clearhead.attention(x, x, x, mask), str(report)


def _mod(fn: Any) -> masks.Mask:
    return masks.mask_mod(users_own(fn) if callable(fn) else fn)


def _keep(tensor: Any = None, keys: Any = None) -> Any:
    return _used(masks.keep(tensor, keys=keys))


def _drop(tensor: Any = None, keys: Any = None) -> Any:
    return _used(masks.drop(tensor, keys=keys))


case("masks.causal")(lambda: Call(lambda align: _used(masks.causal(align)), align="bottom_right"))
case("masks.sliding_window", weight=6, left="window", right="window")(
    lambda: Call(lambda left, right: _used(masks.sliding_window(left, right)), left=1, right=0)
)
case("masks.prefix", weight=6, n="prefix")(lambda: Call(lambda n: _used(masks.prefix(n)), n=LENGTHS))
case("masks.lengths", weight=6, key_lengths="lengths", query_lengths="lengths")(
    lambda: Call(
        lambda key_lengths, query_lengths: _used(masks.lengths(key_lengths, query_lengths)),
        **{"key_lengths": LENGTHS, "query_lengths": LENGTHS},
    )
)
case("masks.documents", weight=6, ids="documents")(
    lambda: Call(lambda ids: _used(masks.documents(ids)), ids=torch.tensor([0, 0, 1, 1, 2]))
)
case("masks.block_causal", size="size")(lambda: Call(lambda size: _used(masks.block_causal(size)), size=2))
case("masks.tree", weight=6, parents="tree")(
    lambda: Call(lambda parents: _used(masks.tree(parents)), parents=torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]]))
)
case("masks.selected", weight=6, indices="selected")(
    lambda: Call(
        lambda indices, block: _used(masks.selected(indices, block=block)),
        **{"indices": torch.tensor([[[0, -1], [1, 0], [2, 2], [3, 1], [4, 0]]]), "block": 1},
    )
)
case("masks.mask_mod", fn="where")(lambda: Call(lambda fn: _used(_mod(fn)), fn=lambda b, h, q, k: (q - k) % 2 == 0))
case("masks.keep", weight=6, **MARKS)(lambda: Call(_keep, tensor=torch.ones(5, 5)))
case("masks.keep(keys=...)", weight=6, **MARKS)(lambda: Call(_keep, keys=torch.ones(2, 5)))
case("masks.drop", weight=6, tensor=("drop", "mask"), keys=("drop", "mask"))(
    lambda: Call(_drop, tensor=torch.ones(5, 5))
)
case("masks.bias", weight=6, tensor=("bias", "mask"))(
    lambda: Call(lambda tensor: _used(masks.bias(tensor)), tensor=torch.randn(2, 3, 5, 5))
)


def _sizes() -> dict[str, Any]:
    places = {"query_positions": torch.arange(5), "key_positions": torch.arange(5)}
    return {"query_length": 5, "key_length": 5, "batch_size": 2, "num_heads": 3, **places}


# Masks speak of the sizes of a call by their letters.
case("Mask.dense", weight=8, **LETTERS)(lambda: Call((masks.causal() & masks.lengths(LENGTHS)).dense, **_sizes()))
case("Mask.prepare", weight=8, **LETTERS)(lambda: Call((masks.causal() & masks.lengths(LENGTHS)).prepare, **_sizes()))


@case("Mask.dense of a tensor", weight=4, **LETTERS)
def _() -> Call:
    mask = masks.keep(torch.ones(5, 5)) & masks.documents(torch.arange(5)) & masks.bias(torch.zeros(2, 3, 5, 5))
    return Call(mask.dense, **_sizes())


case("Mask.check", weight=8, **LETTERS)(
    lambda: Call((masks.sliding_window(2, 0) & masks.lengths(LENGTHS)).check, **_sizes())
)
case("Mask.check of a rule", weight=4)(
    lambda: Call((masks.causal("bottom_right") | masks.prefix(2)).check, query_length=5, key_length=7)
)
case("Mask & other", other=("mask", "bias"))(
    lambda: Call(lambda other: _used(masks.causal() & other), other=torch.ones(5, 5).bool())
)
case("Mask | other", other=("mask", "bias"))(
    lambda: Call(lambda other: _used(masks.causal() | other), other=torch.ones(5, 5).bool())
)
