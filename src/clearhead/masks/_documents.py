"""The mask of packed documents, of which each sees itself alone."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from .._environment import is_tracing, is_transformed
from ..errors import ArgumentError, ShapeError, shape_text
from ._base import Mask
from ._grid import Block, Grid, Sizes, take
from ._of_tensor import OfTensor, broadcasts, require_integers
from ._structure import UNKNOWN, RowRanges, Structure

_WORTH_WAITING = 1 << 22  # scores; fewer take less time than an accelerator's answer


def documents(ids: Tensor) -> Mask:
    """Let queries see only keys of their own document: id of query = id of key.

    Args:
        ids: integer tensor (T,) or (B, T): the document each position belongs to. Without explicit
            positions T must equal both L and S; with them, ids are looked up at the absolute positions.

    Raises:
        DTypeError: for floats or bools.
        ShapeError: for other shapes, or at the call if T does not fit.

    Example:
        >>> documents(torch.tensor([0, 0, 1])).dense()[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    require_integers("ids", ids)
    if ids.dim() not in (1, 2):
        raise ShapeError("ids", expected="shape (T,) or (B, T)", got=shape_text(ids.shape))
    return _Documents(ids)


@final
class _Documents(OfTensor):
    """See `documents`."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__("documents", ids if ids.dim() == 2 else ids[None])  # (1 or B, T)

    def signature(self) -> None:
        # Whether documents lie in one piece, and so how the mask is lowered, depends on the ids' values.
        return None

    def structure(self, grid: Grid) -> Structure:
        if grid.shift is None or is_tracing() or is_transformed() or not _worth_reading(self._tensor, grid):
            return UNKNOWN
        # Documents in several pieces are evaluated; there is no one range per row.
        ranges = _row_ranges(self._tensor)
        if ranges is None:
            return UNKNOWN
        query, key = int(grid.query_positions or 0), int(grid.key_positions or 0)
        # From positions to the rows and columns of this call.
        first, stop = (numbers[:, query : query + grid.query_length].to(grid.device) - key for numbers in ranges)
        return Structure(rows=RowRanges(first, stop))

    def visible(self, block: Block) -> Tensor:
        # Looked up at absolute positions: under a cache the call's rows are the last tokens alone.
        ids = take(self._tensor.to(block.grid.device), 0, block.batch)
        queries = _look_up(ids, block.q[:, 0, :, 0])[:, None, :, None]  # (1 or b, 1, l, 1)
        k = block.k[:, :, 0]  # (1 or b, 1 or h, s)
        keys = _look_up(ids, k.flatten(1)).unflatten(1, k.shape[1:])[:, :, None]  # (1 or b, 1 or h, 1, s)
        return queries == keys

    def validate(self, grid: Grid) -> None:
        batch, length = self._tensor.shape
        if not broadcasts(batch, grid.batch_size):
            expected = f"ids of shape (T,) or ({grid.batch_size}, T)"
            raise ShapeError("mask documents(...)", expected=expected, got=shape_text(self._tensor.shape))
        if grid.has_positions:
            if not is_tracing():
                self._require_ids(grid)
            return
        if length != grid.query_length or length != grid.key_length:
            raise ShapeError(
                "mask documents(...)",
                expected=f"one id per position, with L = {grid.query_length} and S = {grid.key_length} both "
                "equal to that count",
                got=f"{length} ids",
                fix="For queries that are only a part of the keys, pass query_positions and key_positions.",
            )

    def _require_ids(self, grid: Grid) -> None:
        block, length = Block(grid), self._tensor.shape[1]
        for name, positions in (("query_positions", block.q), ("key_positions", block.k)):
            if positions.numel() and not bool(((positions >= 0) & (positions < length)).all()):
                raise ArgumentError(
                    "mask documents(...)",
                    expected=f"positions from 0 to {length - 1}, one for each of the {length} ids",
                    got=f"positions from {int(positions.min())} to {int(positions.max())} in {name}",
                    fix="Give ids for every absolute position.",
                )

    def sizes(self) -> Sizes:
        batch, length = self._tensor.shape
        return replace(Sizes.of(batch), query_length=length, key_length=length)


def _worth_reading(ids: Tensor, grid: Grid) -> bool:
    """Whether values may be read; an accelerator is waited for, which only pays where much can be skipped."""
    return ids.is_cpu or grid.query_length * grid.key_length >= _WORTH_WAITING


def _row_ranges(ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """For each place the first and one past the last place of its document, (1 or B, T) each.

    ``None`` if a document of any item does not lie in one piece.
    """
    length = ids.shape[1]
    # Running extremes of nothing are refused by PyTorch.
    if ids.numel() == 0:
        return None
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    # Sorted by id, neighbours of one document have to be of one run.
    runs = new.cumsum(1)
    ordered, order = ids.sort(stable=True, dim=1)
    runs_ordered = runs.gather(1, order)
    split = (ordered[:, 1:] == ordered[:, :-1]) & (runs_ordered[:, 1:] != runs_ordered[:, :-1])
    if bool(split.any()):
        return None
    places = torch.arange(length, device=ids.device).expand_as(ids)
    first = places.masked_fill(~new, 0).cummax(1).values  # (1 or B, T): the last start so far
    starts_after = places.masked_fill(~new, length)[:, 1:]
    stop = starts_after.flip(1).cummin(1).values.flip(1)  # (1 or B, T − 1)
    return first, torch.nn.functional.pad(stop, (0, 1), value=length)


def _look_up(ids: Tensor, positions: Tensor) -> Tensor:
    """Look ids (1 or b, T) up at positions (1 or b, n) → (1 or b, n)."""
    # `gather` does not broadcast.
    batch = positions.shape[0] if ids.shape[0] == 1 else ids.shape[0]
    return ids.expand(batch, -1).gather(1, positions.expand(batch, -1))
