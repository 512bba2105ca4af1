"""What the native kernel takes of a mask: a band, a run of columns for each row, and tensors that it reads in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._call.spec import AttentionCall
from ..masks._band import Band, band_of
from ..masks._base import Mask
from ..masks._grid import Block
from ..masks._lowering import chosen_cell
from ..masks._tensors import four_dimensional

__all__ = ["Lowered", "differs_between_heads", "learnt_shape", "lower"]


@dataclass(frozen=True)
class Lowered:
    """A key is seen where all of these allow it.

    Args:
        low, high, stop: row i sees i + low ≤ j ≤ i + high and j < stop.
        spans: first and one past the last column of each row, int32 (1 or B, 1 or L) each, or ``None``.
        visible: bool (1 or B, 1 or H, 1 or L, 1 or S), or ``None``.
        bias: float32 of such a shape, added to the scores, or ``None``.
    """

    low: int
    high: int
    stop: int
    spans: tuple[Tensor, Tensor] | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None


def differs_between_heads(call: AttentionCall) -> bool:
    """Whether lowering would have to compute a tensor of the size of the scores; one cell shows how it broadcasts."""
    if call.mask is None or 0 in call.query.shape or call.grid.key_length == 0:
        return False
    cell = None
    for part in call.mask.parts():
        if part.is_tensor or band_of(part, call.grid) is not None or part.row_spans(call.grid) is not None:
            continue
        cell = cell or chosen_cell(call.grid)
        for tensor in (part.visible(cell), part.bias(cell, torch.float32)):
            if tensor is not None and tensor.shape[1] > 1:
                return True
    return False


def lower(call: AttentionCall) -> Lowered:
    """Tell the parts of the call's mask apart; what is neither band nor run becomes a tensor."""
    grid = call.grid
    if call.mask is None:
        return Lowered(-grid.query_length, grid.key_length, grid.key_length)
    band: Band | None = None
    spans, visible, bias = None, None, None
    block = Block(grid)
    for part in call.mask.parts():
        of_part = band_of(part, grid)
        if of_part is not None:
            band = of_part if band is None else band.meet(of_part.low, of_part.high, of_part.stop)
            continue
        runs = part.row_spans(grid)
        if runs is not None:
            spans = runs if spans is None else _meet(spans, runs)
            continue
        bias = _sum(bias, part.bias(block, torch.float32))
        if not _hides_by_bias(part):
            visible = _both(visible, part.visible(block))
    if band is None:
        return Lowered(-grid.query_length, grid.key_length, grid.key_length, spans, visible, bias)
    return Lowered(band.low, band.high, band.stop, spans, visible, bias)


def learnt_shape(call: AttentionCall) -> tuple[int, int, int, int] | None:
    """The shape of the one bias that wants a gradient, (1 or B, H, L, S); ``None`` for several or other shapes."""
    batch, heads, length, _ = call.query.shape
    parts = [] if call.mask is None else call.mask.parts()
    learnt = [part for part in parts if any(bias.requires_grad for bias in part.bias_tensors())]
    if len(learnt) != 1 or not learnt[0].is_tensor:
        return None
    (bias,) = learnt[0].bias_tensors()
    items, *matrix = four_dimensional(bias, call.grid).shape
    if items not in (1, batch) or matrix != [heads, length, call.key.shape[2]]:
        return None
    return items, heads, length, call.key.shape[2]


def _hides_by_bias(part: Mask) -> bool:
    """A given tensor of numbers hides with its −∞, which are added anyhow."""
    return part.is_tensor and part.has_bias


def _meet(spans: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.maximum(spans[0], others[0]), torch.minimum(spans[1], others[1])


def _sum(bias: Tensor | None, other: Tensor | None) -> Tensor | None:
    return bias if other is None else other if bias is None else bias + other


def _both(visible: Tensor | None, other: Tensor | None) -> Tensor | None:
    return visible if other is None else other if visible is None else visible & other
