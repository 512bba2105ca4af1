"""The score matrix of a call: its sizes, its absolute positions, and rectangles of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Index = slice | Tensor
ALL = slice(None)  # compared by value: a dimension that is not cut needs no operator


# A function, because torch.compile traces no call of `dict[object, Any]`.
def _empty() -> dict[object, Any]:
    return {}


@dataclass(frozen=True)
class Grid:
    """Sizes of one attention call, and where its queries and keys stand.

    Args:
        batch_size: B.
        num_heads: H, query heads.
        query_length: L.
        key_length: S.
        device: where masks build their tensors.
        query_positions: absolute positions of the queries: (1 or B, L), or an int p for p … p + L−1; ``None`` means
            that the caller named none, and 0 … L−1.
        key_positions: of the keys: (1 or B, S), per head (B, H, S), or an int; ``None`` as above.
    """

    batch_size: int
    num_heads: int
    query_length: int
    key_length: int
    device: torch.device
    query_positions: Tensor | int | None = None
    key_positions: Tensor | int | None = None
    #: What a mask has found out for this grid at some cost; it lives as long as the call.
    memo: dict[object, Any] = field(default_factory=_empty, compare=False, repr=False)

    @property
    def has_positions(self) -> bool:
        """Whether the caller said where queries or keys stand."""
        return self.query_positions is not None or self.key_positions is not None

    @property
    def shift(self) -> int | None:
        """How far the first query stands after the first key; ``None`` where positions do not simply count up."""
        # Where both count up, what depends on their difference is a band of the score matrix, known without any tensor.
        if isinstance(self.query_positions, Tensor) or isinstance(self.key_positions, Tensor):
            return None
        return (self.query_positions or 0) - (self.key_positions or 0)


class Offset(NamedTuple):
    """Where a call lies in a larger one.

    Args:
        num_heads: H of the larger call.
        head, row, column, item: the first head, query, key and batch item of the call, counted in the larger one.
    """

    num_heads: int
    head: int = 0
    row: int = 0
    column: int = 0
    item: int = 0


@dataclass(frozen=True)
class Sizes:
    """What a mask knows of the call it was made for; ``None`` where it fits any size."""

    batch_size: int | None = None
    num_heads: int | None = None
    query_length: int | None = None
    key_length: int | None = None
    fewest_keys: int = 0  # of lengths, which leave S open but need room for the longest
    device: torch.device | None = None  # of a prepared mask; others follow the call

    @staticmethod
    def of(
        batch_size: int, num_heads: int = 1, query_length: int = 1, key_length: int = 1, fewest_keys: int = 0
    ) -> Sizes:
        """What a tensor of these sizes determines: a size of 1 broadcasts, and fits any."""
        sizes = (None if size == 1 else size for size in (batch_size, num_heads, query_length, key_length))
        return Sizes(*sizes, fewest_keys=fewest_keys)

    def merged(self, other: Sizes) -> Sizes:
        return Sizes(
            self.batch_size if self.batch_size is not None else other.batch_size,
            self.num_heads if self.num_heads is not None else other.num_heads,
            self.query_length if self.query_length is not None else other.query_length,
            self.key_length if self.key_length is not None else other.key_length,
            max(self.fewest_keys, other.fewest_keys),
            self.device if self.device is not None else other.device,
        )


@dataclass(frozen=True)
class Block:
    """A rectangle of the grid: some batch items and heads, some rows (queries), some columns (keys).

    `rows` and `columns` are slices with explicit ends, or index tensors when chosen rows are wanted.
    """

    grid: Grid
    # Made anew for each block: slices have no hash before Python 3.12, and dataclasses refuse such defaults.
    batch: slice = field(default_factory=lambda: ALL)
    heads: slice = field(default_factory=lambda: ALL)
    rows: Index = field(default_factory=lambda: ALL)
    columns: Index = field(default_factory=lambda: ALL)

    @property
    def b(self) -> Tensor:
        """Batch indices, (b, 1, 1, 1)."""
        return _indices(self.batch, self.grid.batch_size, self.grid.device)[:, None, None, None]

    @property
    def h(self) -> Tensor:
        """Query head indices, (1, h, 1, 1)."""
        return _indices(self.heads, self.grid.num_heads, self.grid.device)[None, :, None, None]

    @property
    def i(self) -> Tensor:
        """Row numbers of this call, (1, 1, l, 1)."""
        return _indices(self.rows, self.grid.query_length, self.grid.device)[None, None, :, None]

    @property
    def j(self) -> Tensor:
        """Column numbers of this call, (1, 1, 1, s)."""
        return _indices(self.columns, self.grid.key_length, self.grid.device)[None, None, None, :]

    @property
    def q(self) -> Tensor:
        """Absolute positions of the queries, (1 or b, 1, l, 1)."""
        positions = self.grid.query_positions
        if not isinstance(positions, Tensor):
            return self.i if positions is None else self.i + positions
        return take(take(positions, 0, self.batch), 1, self.rows)[:, None, :, None]

    @property
    def k(self) -> Tensor:
        """Absolute positions of the keys, (1 or b, 1 or h, 1, s)."""
        positions = self.grid.key_positions
        if not isinstance(positions, Tensor):
            return self.j if positions is None else self.j + positions
        per_head = positions if positions.dim() == 3 else positions[:, None]  # (1 or B, 1 or H, S)
        return take(take(take(per_head, 0, self.batch), 1, self.heads), 2, self.columns)[:, :, None, :]

    @property
    def ends(self) -> tuple[int, int, int, int] | None:
        """First and one past the last row, the same of the columns; ``None`` for chosen ones."""
        if isinstance(self.rows, Tensor) or isinstance(self.columns, Tensor):
            return None
        # Numbers, not tensors: masks look at them to leave out what hides nothing in a block.
        first_row, stop_row = (0, self.grid.query_length) if self.rows == ALL else (self.rows.start, self.rows.stop)
        first, stop = (0, self.grid.key_length) if self.columns == ALL else (self.columns.start, self.columns.stop)
        return first_row, stop_row, first, stop

    def cut(self, tensor: Tensor) -> Tensor:
        """The part of a (1 or B, 1 or H, 1 or L, 1 or S) tensor that lies in this block; a view for slices."""
        for dim, index in enumerate((self.batch, self.heads, self.rows, self.columns)):
            tensor = take(tensor, dim, index)
        return tensor


def take(tensor: Tensor, dim: int, index: Index) -> Tensor:
    """Select along one dimension; a dimension of size 1 broadcasts and is left alone."""
    if tensor.shape[dim] == 1:
        return tensor
    if isinstance(index, Tensor):
        return tensor.index_select(dim, index)  # a copy
    if index == ALL:
        return tensor
    return tensor[(ALL,) * dim + (index,)]  # a view, through which gradients of biases are added


def _indices(index: Index, length: int, device: torch.device) -> Tensor:
    if isinstance(index, Tensor):
        return index
    if index == ALL:
        return torch.arange(length, device=device)
    return torch.arange(index.start, index.stop, device=device)
