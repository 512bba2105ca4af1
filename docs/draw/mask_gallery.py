"""The gallery of masks: one small picture for each, drawn from the mask itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from clearhead import masks

from .canvas import BLUE, EMPTY, PALE, Canvas, shade

CELL = 15


class Example(NamedTuple):
    """One mask of the gallery."""

    code: str
    length: int = 8
    keys: int | None = None
    items: int = 1


#: Name of the picture → the code, as it stands on the page.
GALLERY = {
    "causal": Example("masks.causal()"),
    "causal-bottom-right": Example('masks.causal("bottom_right")', 4, 8),
    "sliding-window": Example("masks.sliding_window(2, 0)"),
    "sliding-window-both": Example("masks.sliding_window(1, 1)"),
    "block-causal": Example("masks.block_causal(3)"),
    "tree": Example("masks.tree(torch.tensor([-1, 0, 0, 1, 1, 2]))", 6, 8),
    "prefix": Example("masks.prefix(3)"),
    "lengths": Example("masks.lengths(torch.tensor([8, 5]))", items=2),
    "lengths-queries": Example("masks.lengths(torch.tensor([8, 5]), query_lengths=torch.tensor([8, 5]))", items=2),
    "lengths-per-query": Example("masks.lengths(torch.tensor([[1, 2, 3, 4, 4, 4, 4, 4]]))"),
    "documents": Example("masks.documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]))"),
    "selected": Example(
        "masks.selected(torch.tensor([[[0, -1], [0, 1], [1, 2], [0, 3], [1, 4], [4, 5], [0, 6], [4, 7]]]))"
    ),
    "selected-blocks": Example("masks.selected(torch.tensor([[[0], [0], [0], [1], [0], [1], [2], [1]]]), block=3)"),
    "keep": Example("masks.keep(torch.eye(8, dtype=torch.bool))"),
    "keep-keys": Example("masks.keep(keys=torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]))"),
    "drop": Example("masks.drop(torch.eye(8, dtype=torch.bool))"),
    "drop-keys": Example("masks.drop(keys=torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]))"),
    "bias": Example("masks.bias(-(torch.arange(8.0)[:, None] - torch.arange(8.0)).abs())"),
    "mask-mod": Example("masks.mask_mod(lambda b, h, q, k: (q - k) % 3 == 0)"),
    "and-window": Example("masks.causal() & masks.sliding_window(2, 0)"),
    "and-lengths": Example("masks.causal() & masks.lengths(torch.tensor([8, 5]))", items=2),
    "and-documents": Example("masks.causal() & masks.documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]))"),
    "or-prefix": Example("masks.causal() | masks.prefix(3)"),
    "sink-window": Example("masks.causal() & (masks.sliding_window(2, 0) | masks.prefix(1))"),
    "not": Example("~masks.causal()"),
    "and-bias": Example("masks.causal() & masks.bias(-(torch.arange(8.0)[:, None] - torch.arange(8.0)).abs())"),
}


def made(example: Example) -> masks.Mask:
    """The mask of an example."""
    return eval(example.code, {"masks": masks, "torch": torch})


def draw(name: str) -> Canvas:
    """One mask: a grid for each batch item, queries down, keys across."""
    example = GALLERY[name]
    dense = made(example).dense(example.length, example.keys)[:, 0]  # (items, L, S)
    items, rows, columns = dense.shape
    left, top, gap = 22, 20, 14
    width = left + items * columns * CELL + (items - 1) * gap + 6
    canvas = Canvas(width, top + rows * CELL + 6, f"{example.code}: blue keys are visible from the query of the row")
    canvas.text(10, top + rows * CELL / 2, "queries", size=10, anchor="middle", fill=PALE, turned=True)
    for item in range(items):
        x = left + item * (columns * CELL + gap)
        label = "keys" if items == 1 else f"keys, item {item}"
        canvas.text(x + columns * CELL / 2, 10, label, size=10, anchor="middle", fill=PALE)
        canvas.grid(x, top, [[color(value) for value in row] for row in dense[item].tolist()], CELL)
    return canvas


def color(value: bool | float) -> str:
    """Blue is visible and grey is hidden; a bias is paler the more it takes away."""
    if isinstance(value, bool):
        return BLUE if value else EMPTY
    return EMPTY if value == float("-inf") else shade(max(0.06, 1 + value / 8))


PICTURES: dict[str, Callable[[], Canvas]] = {f"masks/{name}.svg": partial(draw, name) for name in GALLERY}
