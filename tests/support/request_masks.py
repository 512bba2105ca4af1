"""Masks for generated calls, each beside what it shows, written with PyTorch's operations alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead import masks

__all__ = ["MASKS", "Frame", "Shown", "window"]


class Frame(NamedTuple):
    """Sizes of a call, and where its queries (1 or B, L) and keys (1 or B, S) stand."""

    batch: int
    heads: int
    length: int
    keys: int
    query_positions: Tensor
    key_positions: Tensor
    positioned: bool
    random: torch.Generator

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def marks(self, *shape: int) -> Tensor:
        """Bool: three of five; the first row, and the last column, are hidden altogether."""
        found = torch.rand(shape, generator=self.random) < 0.6
        found[..., 0, :] = False
        found[..., -1] = False
        return found

    @property
    def difference(self) -> Tensor:
        """How far each query stands after each key, (1 or B, 1, L, S)."""
        return self.query_positions[:, None, :, None] - self.key_positions[:, None, None, :]


class Shown(NamedTuple):
    """A mask, what it shows (broadcasts to (B, H, L, S)), and what it adds."""

    mask: Any
    visible: Tensor | None = None
    bias: Tensor | None = None


def _causal(f: Frame) -> Shown:
    return Shown(masks.causal(), f.difference >= 0)


def _bottom_right(f: Frame) -> Shown:
    shift = 0 if f.positioned else f.keys - f.length
    return Shown(masks.causal("bottom_right"), f.difference >= -shift)


def window(left: int, right: int) -> Callable[[Frame], Shown]:
    return lambda f: Shown(masks.sliding_window(left, right), (f.difference <= left) & (f.difference >= -right))


def _prefix(f: Frame) -> Shown:
    shown = f.key_positions[:, None, None, :] < 3
    return Shown(masks.causal() | masks.prefix(3), shown | (f.difference >= 0))


def _keys(f: Frame) -> Shown:
    marks = torch.rand(f.batch, f.keys, generator=f.random) < 0.6
    marks[:, -1] = False
    return Shown(masks.keep(keys=marks), marks[:, None, None])


def _drop(f: Frame) -> Shown:
    marks = f.marks(f.length, f.keys)
    return Shown(masks.drop(~marks), marks)


def _per_item(f: Frame) -> Shown:
    marks = f.marks(f.batch, 1, f.length, f.keys)
    return Shown(masks.keep(marks), marks)


def _per_head(f: Frame) -> Shown:
    marks = f.marks(1, f.heads, f.length, f.keys)
    return Shown(masks.keep(marks), marks)


def _bool_tensor(f: Frame) -> Shown:
    marks = f.marks(f.length, f.keys)
    return Shown(marks, marks)


def _lengths(f: Frame) -> Shown:
    counts = (torch.rand(f.batch, generator=f.random) * f.keys).long()
    return Shown(masks.lengths(counts), f.key_positions[:, None, None, :] < counts[:, None, None, None])


def _bias(f: Frame) -> Shown:
    added = f.drawn(1, f.heads, f.length, f.keys)
    return Shown(None, None, added)


def _bias_of_items(f: Frame) -> Shown:
    added = f.drawn(f.batch, 1, f.length, f.keys).masked_fill(~f.marks(f.length, f.keys), -torch.inf)
    return Shown(None, None, added)


def _documents(f: Frame) -> Shown:
    most = 1 + int(max(f.query_positions.max(), f.key_positions.max())) if f.positioned else max(f.keys, f.length)
    ids = torch.arange(most) // 3
    same = ids[f.query_positions][:, None, :, None] == ids[f.key_positions][:, None, None, :]
    return Shown(masks.documents(ids), same)


def _computed(f: Frame) -> Shown:
    items = torch.arange(f.batch)[:, None, None, None]
    shown = (f.query_positions[:, None, :, None] + f.key_positions[:, None, None, :] + items) % 3 > 0
    return Shown(masks.mask_mod(lambda b, h, q, k: (q + k + b) % 3 > 0), shown)


def _both(*names: str) -> Callable[[Frame], Shown]:
    def make(f: Frame) -> Shown:
        first, *others = (MASKS[name](f) for name in names)
        mask, visible, bias = first
        for other in others:
            if other.mask is not None:
                mask = other.mask if mask is None else mask & other.mask
            if other.visible is not None:
                visible = other.visible if visible is None else visible & other.visible
            bias = bias if other.bias is None else other.bias
        return Shown(mask, visible, bias)

    return make


#: A bias stands in `Shown.bias` alone: its caller makes a mask of it in the dtype, and with the gradient, it wants.
MASKS: dict[str, Callable[[Frame], Shown]] = {
    "causal": _causal,
    "bottom right": _bottom_right,
    "window": window(2, 1),
    "other window": window(1, 3),
    "prefix": _prefix,
    "keys": _keys,
    "drop": _drop,
    "per item": _per_item,
    "per head": _per_head,
    "bool tensor": _bool_tensor,
    "lengths": _lengths,
    "bias": _bias,
    "bias of items": _bias_of_items,
    "documents": _documents,
    "computed": _computed,
    "causal and keys": _both("causal", "keys"),
    "window and bias": _both("window", "bias"),
}
