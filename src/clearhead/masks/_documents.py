"""The mask of packed sequences, whose queries attend only to their own sequence."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .._environment import reads_values
from .._proxies import recorded_call
from ..errors import ArgumentError, ClearheadError, ShapeError, shape_text
from ._base import Mask
from ._grid import Block, Grid, Sizes, take
from ._of_tensor import OfTensor, broadcasts, require_integers
from ._structure import RowRanges, Structure, unknown_at


def documents(ids: Tensor) -> Mask:
    """Let queries attend only to keys of their own document: id of query = id of key.

    Args:
        ids: integer tensor (T,) or (B, T): the document of each position. Without explicit positions T must equal L
            and S. With them, the ids are read at the absolute positions.

    Raises:
        DTypeError: for floats or bools.
        ShapeError: for other shapes, or at the call if T does not fit.

    Example:
        >>> documents(torch.tensor([0, 0, 1])).dense()[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    try:
        require_integers("ids", ids)
    except ClearheadError as error:
        return recorded_call(documents, error, locals())
    if ids.dim() not in (1, 2):
        raise ShapeError("ids", expected="shape (T,) or (B, T)", got=shape_text(ids.shape))
    return Documents(ids)


@final
class Documents(OfTensor):
    """See `documents`."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__("documents", ids if ids.dim() == 2 else ids[None])  # (1 or B, T)

    def structure(self, grid: Grid) -> Structure:
        if grid.shift is None:
            return unknown_at(grid)
        ids, query, key = self.on(grid), int(grid.query_positions or 0), int(grid.key_positions or 0)
        rows = slice(query, query + grid.query_length)
        documents = ids[:, rows], ids[:, key : key + grid.key_length]
        # Sequences that are not contiguous have no single range per row. To read ids from an accelerator, or to move
        # ranges to it, would wait for it.
        ranges = _row_ranges(ids) if grid.has_values and grid.device.type == "cpu" else None
        # From positions to rows and columns of this call.
        found = None if ranges is None else RowRanges(ranges[0][:, rows] - key, ranges[1][:, rows] - key)
        # A position is in its own document.
        exact = found is not None
        return Structure(exact, rows=found, diagonal=grid.shift == 0, documents=documents, per_head=False)

    def visible(self, block: Block) -> Tensor:
        # At absolute positions: with a cache, the rows of the call are only the last tokens.
        ids = take(self.on(block.grid), 0, block.batch)
        if not block.grid.has_positions:
            return take(ids, 1, block.rows)[:, None, :, None] == take(ids, 1, block.columns)[:, None, None]
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
            self._require_ids(grid)
            return
        if length != grid.query_length or length != grid.key_length:
            sizes = f"L = {grid.query_length} and S = {grid.key_length}"
            expected = f"one id per position, with {sizes} both equal to that count"
            fix = "For queries that are only a part of the keys, pass query_positions and key_positions."
            raise ShapeError("mask documents(...)", expected=expected, got=f"{length} ids", fix=fix)

    def _require_ids(self, grid: Grid) -> None:
        block, length = Block(grid), self._tensor.shape[1]
        for name, positions in (("query_positions", block.q), ("key_positions", block.k)):
            if not positions.numel() or not reads_values(positions):
                continue
            if not bool(((positions >= 0) & (positions < length)).all()):
                expected = f"positions from 0 to {length - 1}, one for each of the {length} ids"
                got = f"positions from {int(positions.min())} to {int(positions.max())} in {name}"
                fix = "Give ids for every absolute position."
                raise ArgumentError("mask documents(...)", expected=expected, got=got, fix=fix)

    def sizes(self) -> Sizes:
        batch, length = self._tensor.shape
        return Sizes.of(batch)._replace(query_length=length, key_length=length)


def _row_ranges(ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """First and one past the last position of the sequence at each position, (1 or B, T) each.

    ``None`` if a sequence of any item is not contiguous.
    """
    is_start = torch.ones_like(ids, dtype=torch.bool)
    is_start[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = is_start.flatten().nonzero()[:, 0]  # of the segments of all items, end to end
    # Each sequence is one segment if there are as many segments as different ids.
    sorted_ids = ids.sort(dim=1).values
    if len(starts) > len(ids) + int((sorted_ids[:, 1:] != sorted_ids[:, :-1]).sum()):
        return None
    counts = starts.diff(append=starts.new_tensor([ids.numel()]))
    first = (
        starts.repeat_interleave(counts).view(ids.shape)
        - torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1]
    )
    return first, first + counts.repeat_interleave(counts).view(ids.shape)


def _look_up(ids: Tensor, positions: Tensor) -> Tensor:
    """The ids (1 or b, T) at positions (1 or b, n), (1 or b, n)."""
    if not positions.is_cpu:  # unchecked
        positions = positions.clamp(0, ids.shape[1] - 1)
    return torch.take_along_dim(ids, positions, 1)  # which broadcasts, as `gather` does not
