"""Masks that show the first keys of each batch item: right padding and prefixes with a tensor."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from .._environment import is_tracing, reads_values
from .._proxies import recorded_call
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text
from ._base import Mask
from ._grid import Block, Grid, Sizes, take
from ._of_tensor import OfTensor, broadcasts, require_integers
from ._structure import RowRanges, Structure, unknown_at


def lengths(key_lengths: Tensor, query_lengths: Tensor | None = None) -> Mask:
    """Let queries attend only to the first `key_lengths` keys of their batch item: right padding.

    With `query_lengths`, all keys are masked for queries that are padding. Attention returns zero for them, and a
    module ``out_proj(0)``. Modules remove them from the batch if that is faster. On a GPU they do so only for lengths
    on the CPU, which are known without a wait.

    Args:
        key_lengths: integer tensor (B,), one length per batch item, or (B, L), one per query
            (`valid_lens` in Dive into Deep Learning). A length of zero hides all keys.
        query_lengths: integer tensor (B,), the number of queries of each item that are no padding. Default: all.

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
        expected, fix = "an integer tensor of shape (B,) or (B, L)", "Write masks.lengths(torch.tensor([...]))."
        error = DTypeError("key_lengths", expected=expected, got=type(key_lengths).__name__, fix=fix)
        return recorded_call(lengths, error, locals())
    require_integers("key_lengths", key_lengths)
    if key_lengths.dim() not in (1, 2):
        raise ShapeError("key_lengths", expected="shape (B,) or (B, L)", got=shape_text(key_lengths.shape))
    of_keys = Lengths(key_lengths, "lengths")
    if query_lengths is None:
        return of_keys
    require_integers("query_lengths", query_lengths)
    if query_lengths.dim() != 1:
        raise ShapeError("query_lengths", expected="shape (B,)", got=shape_text(query_lengths.shape))
    # Two masks, because padded queries can be removed without padded keys, and keys without queries.
    return of_keys & QueryLengths(query_lengths, of_keys if query_lengths is key_lengths else None)


class Counts(OfTensor):
    """The number of first positions of each batch item that are no padding."""

    def __init__(self, name: str, argument: str, counts: Tensor) -> None:
        super().__init__(name, counts)
        self._argument = argument
        self._largest = 0
        self._read()

    def _read(self) -> None:
        """Check the values and keep the largest one."""
        counts = self._tensor
        if counts.numel() == 0 or not reads_values(counts):
            return
        self._largest, smallest = int(counts.max()), int(counts.min())
        if smallest < 0:
            raise ArgumentError(self._argument, expected="numbers ≥ 0", got=f"a smallest one of {smallest}")

    def _require_at_most(self, length: int, size: str, argument: str, tokens: str) -> None:
        """Raise if a length is larger than the call's L or S, which without positions is a mistake."""
        if not self._tensor.is_cpu:
            self._read()  # the mask may have been made where values are not checked
        if self._largest > length and not is_tracing():
            expected, got = f"{argument} of at most {size} = {length} {tokens}", f"a length of {self._largest}"
            fix = f"Lengths count {tokens} of this call; cut them, or check that they belong to this batch."
            raise ArgumentError("mask lengths(...)", expected=expected, got=got, fix=fix)

    def _unfit(self, mask: str, expected: str) -> ShapeError:
        got, fix = shape_text(self._tensor.shape), "Give one number per batch item."
        return ShapeError(f"mask {mask}(...)", expected=expected, got=got, fix=fix)


@final
class Lengths(Counts):
    """`lengths` and `prefix` with a tensor: the number of first keys that are visible to each query."""

    def __init__(self, lengths: Tensor, name: Literal["lengths", "prefix"]) -> None:
        super().__init__(name, "key_lengths" if name == "lengths" else "n", lengths)

    def visible(self, block: Block) -> Tensor:
        lengths = self.on(block.grid)
        column = lengths[:, None, None, None] if lengths.dim() == 1 else lengths[:, None, :, None]  # (B, 1, 1 or L, 1)
        return block.k < block.cut(column)

    def structure(self, grid: Grid) -> Structure:
        # Positions that count up turn a range of positions into a range of columns.
        if isinstance(grid.key_positions, Tensor):
            return unknown_at(grid)
        lengths = self.on(grid)
        stop = lengths if lengths.dim() == 2 else lengths.unsqueeze(1)  # (1 or B, 1 or L)
        if grid.key_positions:
            return Structure(rows=RowRanges(None, stop.long() - grid.key_positions))
        if grid.device.type == "cpu" or not self._tensor.is_cpu:
            return Structure(rows=RowRanges(None, stop))
        # Lengths on the CPU tell an accelerator, without a wait, that no row is empty.
        shortest = int(self._tensor.min()) if grid.has_values and self._tensor.numel() > 0 else 0
        return Structure(rows=RowRanges(None, stop, shortest, self._tensor.view_as(stop)))

    def validate(self, grid: Grid) -> None:
        shape = self._tensor.shape
        fits = broadcasts(shape[0], grid.batch_size) and (len(shape) == 1 or broadcasts(shape[1], grid.query_length))
        if not fits:  # only then, because the text reads sizes, which a graph must not fix
            either = f" or ({grid.batch_size}, {grid.query_length})" if self._name == "lengths" else ""
            raise self._unfit(self._name, f"shape ({grid.batch_size},){either}")
        # A prefix may be longer than the keys. With positions, lengths are positions and may exceed the call's sizes.
        if self._name == "lengths" and not grid.has_positions:
            self._require_at_most(grid.key_length, "S", "lengths", "keys")

    def sizes(self) -> Sizes:
        rows = self._tensor.shape[1] if self._tensor.dim() == 2 else 1
        fewest = self._largest if self._name == "lengths" else 0
        return Sizes.of(self._tensor.shape[0], query_length=rows, fewest_keys=fewest)


@final
class QueryLengths(Counts):
    """Hides all keys from padded queries. See `lengths`."""

    def __init__(self, lengths: Tensor, of_keys: Lengths | None = None) -> None:
        super().__init__("query_lengths", "query_lengths", lengths)
        if of_keys is not None:  # of the same tensor, which is then copied to a device once
            self._copies = of_keys._copies  # pyright: ignore[reportPrivateUsage]

    def visible(self, block: Block) -> Tensor:
        return block.q < take(self.on(block.grid), 0, block.batch)[:, None, None, None]

    def structure(self, grid: Grid) -> Structure:
        if isinstance(grid.query_positions, Tensor):
            return Structure(exact=False, per_head=False)
        # One mark per query instead of a range, because a false mark is a fully masked row.
        positions = torch.arange(grid.query_length, device=grid.device) + (grid.query_positions or 0)
        marks = positions < self.on(grid)[:, None]  # (1 or B, L)
        return Structure(queries=marks, query_counts=self._tensor if self._tensor.is_cpu else None)

    def validate(self, grid: Grid) -> None:
        if not broadcasts(self._tensor.shape[0], grid.batch_size):
            raise self._unfit("lengths", f"query_lengths of shape ({grid.batch_size},)")
        if not grid.has_positions:
            self._require_at_most(grid.query_length, "L", "query_lengths", "queries")

    def sizes(self) -> Sizes:
        return Sizes.of(self._tensor.shape[0])
