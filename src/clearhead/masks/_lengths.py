"""Masks that show the first keys of each batch item, as many as a tensor says: right padding and prefixes."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from .._environment import is_tracing
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text
from ._base import Mask
from ._grid import Block, Grid, Sizes, take
from ._of_tensor import OfTensor, broadcasts, require_integers
from ._structure import UNKNOWN, RowRanges, Structure


def lengths(key_lengths: Tensor, query_lengths: Tensor | None = None) -> Mask:
    """Let queries see only the first `key_lengths` keys of their batch item: right padding.

    With `query_lengths`, queries that are padding themselves see nothing: attention gives zero there, a module
    ``out_proj(0)``, and modules leave them out where that is faster.

    Args:
        key_lengths: integer tensor (B,), one length per batch item, or (B, L), one per query
            (`valid_lens` in Dive into Deep Learning). Zero hides everything.
        query_lengths: integer tensor (B,), how many queries of each item are real. Default: all.

    Raises:
        ArgumentError: for negative lengths, and at the call for lengths beyond S or L.
        DTypeError: for floats or bools.
        ShapeError: for other shapes.

    Example:
        >>> lengths(torch.tensor([1, 3])).dense(1, 3)[:, 0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    if not isinstance(key_lengths, Tensor):
        raise DTypeError(
            "key_lengths",
            expected="an integer tensor of shape (B,) or (B, L)",
            got=type(key_lengths).__name__,
            fix="Write masks.lengths(torch.tensor([...])).",
        )
    require_integers("key_lengths", key_lengths)
    if key_lengths.dim() not in (1, 2):
        raise ShapeError("key_lengths", expected="shape (B,) or (B, L)", got=shape_text(key_lengths.shape))
    of_keys = Lengths(key_lengths, "lengths")
    if query_lengths is None:
        return of_keys
    require_integers("query_lengths", query_lengths)
    if query_lengths.dim() != 1:
        raise ShapeError("query_lengths", expected="shape (B,)", got=shape_text(query_lengths.shape))
    # Two masks: padded queries and padded keys are taken out of a batch one without the other.
    return of_keys & _QueryLengths(query_lengths)


class _Counts(OfTensor):
    """How many of the first positions of each batch item are visible, or may see."""

    def __init__(self, name: str, argument: str, counts: Tensor) -> None:
        super().__init__(name, counts)
        # Read once, so that a call on an accelerator never waits for the values.
        self._largest = 0
        if is_tracing() or counts.numel() == 0:
            return
        self._largest, smallest = int(counts.max()), int(counts.min())
        if smallest < 0:
            raise ArgumentError(argument, expected="numbers ≥ 0", got=f"a smallest one of {smallest}")

    def _require_at_most(self, length: int, size: str, of: str, of_this: str) -> None:
        """Raise if a count is larger than the call's L or S, which without positions is a mistake."""
        if self._largest > length and not is_tracing():
            raise ArgumentError(
                "mask lengths(...)",
                expected=f"{of} of at most {size} = {length} {of_this}",
                got=f"a length of {self._largest}",
                fix=f"Lengths count {of_this} of this call; cut them, or check that they belong to this batch.",
            )


@final
class Lengths(_Counts):
    """`lengths` and `prefix` with a tensor: each query sees so many of the first keys."""

    def __init__(self, lengths: Tensor, name: Literal["lengths", "prefix"]) -> None:
        super().__init__(name, "key_lengths" if name == "lengths" else "n", lengths)

    def visible(self, block: Block) -> Tensor:
        # Lengths are counted on the CPU as a rule, and are small.
        lengths = self._tensor.to(block.grid.device)
        column = lengths[:, None, None, None] if lengths.dim() == 1 else lengths[:, None, :, None]  # (B, 1, 1 or L, 1)
        return block.k < block.cut(column)

    def structure(self, grid: Grid) -> Structure:
        # A range of positions is a range of columns only where they count up.
        if isinstance(grid.key_positions, Tensor):
            return UNKNOWN
        lengths = self._tensor.to(grid.device)
        stop = lengths if lengths.dim() == 2 else lengths[:, None]  # (1 or B, 1 or L)
        return Structure(rows=RowRanges(None, stop.long() - grid.key_positions if grid.key_positions else stop))

    def validate(self, grid: Grid) -> None:
        shape = self._tensor.shape
        if not broadcasts(shape[0], grid.batch_size) or (
            len(shape) == 2 and not broadcasts(shape[1], grid.query_length)
        ):
            per_query = f" or ({grid.batch_size}, {grid.query_length})" if self._name == "lengths" else ""
            expected = f"shape ({grid.batch_size},){per_query}"
            fix = "Give one number per batch item."
            raise ShapeError(f"mask {self._name}(...)", expected=expected, got=shape_text(shape), fix=fix)
        # A prefix may be longer than the keys. With positions, lengths count in those and may reach beyond the call.
        if self._name == "lengths" and not grid.has_positions:
            self._require_at_most(grid.key_length, "S", "lengths", "keys")

    def sizes(self) -> Sizes:
        rows = self._tensor.shape[1] if self._tensor.dim() == 2 else 1
        fewest = self._largest if self._name == "lengths" else 0
        return Sizes.of(self._tensor.shape[0], query_length=rows, fewest_keys=fewest)


@final
class _QueryLengths(_Counts):
    """Shows nothing to queries beyond the first so many of each item. See `lengths`."""

    def __init__(self, lengths: Tensor) -> None:
        super().__init__("query_lengths", "query_lengths", lengths)

    def visible(self, block: Block) -> Tensor:
        return block.q < take(self._tensor.to(block.grid.device), 0, block.batch)[:, None, None, None]

    def structure(self, grid: Grid) -> Structure:
        if isinstance(grid.query_positions, Tensor):
            return UNKNOWN
        # A mark per query, which says more than a range: the row is fully masked.
        places = torch.arange(grid.query_length, device=grid.device) + (grid.query_positions or 0)
        return Structure(queries=places < self._tensor.to(grid.device)[:, None])  # (1 or B, L)

    def validate(self, grid: Grid) -> None:
        if not broadcasts(self._tensor.shape[0], grid.batch_size):
            expected, fix = f"query_lengths of shape ({grid.batch_size},)", "Give one number per batch item."
            got = shape_text(self._tensor.shape)
            raise ShapeError("mask lengths(...)", expected=expected, got=got, fix=fix)
        if not grid.has_positions:
            self._require_at_most(grid.query_length, "L", "query_lengths", "queries")

    def sizes(self) -> Sizes:
        return Sizes.of(self._tensor.shape[0])
