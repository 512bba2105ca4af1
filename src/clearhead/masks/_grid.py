"""The score matrix of a call: its sizes, its absolute positions, and blocks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import INTEGERS, integer, strided
from .._environment import Environment, has_values
from ..errors import ShapeError, shape_text

Index = slice | Tensor
ALL = slice(None)  # compared by value, because a dimension that is not cut needs no operator


# Not compared: it would compare positions.
@dataclass(slots=True, eq=False)
class Grid:
    """The sizes of one attention call, and the positions of its queries and keys.

    Args:
        batch_size: B.
        num_heads: H, query heads.
        query_length: L.
        key_length: S.
        device: of the tensors that masks build.
        query_positions: absolute positions of the queries: (1 or B, L), or an int p for p … p + L−1; ``None`` for
            0 … L−1 if the caller passed no positions.
        key_positions: of the keys: (1 or B, S), per head (B, H, S), or an int; ``None`` as above.
        environment: of the call, if it was read.
    """

    batch_size: int
    num_heads: int
    query_length: int
    key_length: int
    device: torch.device
    query_positions: Tensor | int | None = None
    key_positions: Tensor | int | None = None
    environment: Environment | None = None
    _has_values: bool | None = field(default=None, init=False, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether there is no score."""
        return 0 in (self.batch_size, self.num_heads, self.query_length, self.key_length)

    @property
    def has_positions(self) -> bool:
        """Whether the caller passed positions of queries or keys."""
        return self.query_positions is not None or self.key_positions is not None

    @property
    def shift(self) -> int | None:
        """Position of the first query minus position of the first key; ``None`` unless both count up by one."""
        # If both count up, a rule about their difference is a band of the score matrix and needs no tensor.
        if isinstance(self.query_positions, Tensor) or isinstance(self.key_positions, Tensor):
            return None
        return (self.query_positions or 0) - (self.key_positions or 0)

    @property
    def has_values(self) -> bool:
        """Whether values of tensors may be read: see `has_values` of the environment, which is read once."""
        if self._has_values is None:
            around = self.environment
            is_quiet = around is not None and not (around.tracing or around.transformed or around.dispatching)
            self._has_values = is_quiet or has_values()
        return self._has_values


class Offset(NamedTuple):
    """The place of a call in a larger one.

    Args:
        num_heads: H of the larger call.
        head, row, column, item: the first head, query, key and batch item of the call, counted in the larger one.
    """

    num_heads: int
    head: int = 0
    row: int = 0
    column: int = 0
    item: int = 0


class Sizes(NamedTuple):
    """The sizes that a mask requires of a call; ``None`` for sizes that it leaves open."""

    batch_size: int | None = None
    num_heads: int | None = None
    query_length: int | None = None
    key_length: int | None = None
    fewest_keys: int = 0  # the longest length: `lengths` leaves S open above it
    device: torch.device | None = None  # only prepared masks require one

    @staticmethod
    def of(
        batch_size: int, num_heads: int = 1, query_length: int = 1, key_length: int = 1, fewest_keys: int = 0
    ) -> Sizes:
        """The sizes that a tensor of these sizes requires: a size of 1 broadcasts, and fits any."""
        sizes = (None if size == 1 else size for size in (batch_size, num_heads, query_length, key_length))
        return Sizes(*sizes, fewest_keys=fewest_keys)

    def merged(self, other: Sizes) -> Sizes:
        """Both requirements; the first mask decides where the two differ."""
        missing = {name: size for name, size in other._asdict().items() if getattr(self, name) is None}
        return self._replace(**missing, fewest_keys=max(self.fewest_keys, other.fewest_keys))


@dataclass(frozen=True)
class Block:
    """A rectangle of the grid: some batch items and heads, some rows (queries), some columns (keys).

    `rows` and `columns` are slices with explicit ends, or index tensors of selected rows and columns.
    """

    grid: Grid
    # Factories, because slices have no hash before Python 3.12, and dataclasses refuse such defaults.
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
        """First and one past the last row, first and one past the last column; ``None`` for index tensors."""
        # Ints instead of tensors: with them masks skip rules that hide nothing in a block.
        if isinstance(self.rows, Tensor) or isinstance(self.columns, Tensor):
            return None
        return *ends_of(self.rows, self.grid.query_length), *ends_of(self.columns, self.grid.key_length)

    @staticmethod
    def cell(grid: Grid) -> Block:
        """One cell of all items and heads, which shows how a mask broadcasts.

        It has index tensors, because masks may return ``None`` for slices.
        """
        first = torch.zeros(1, dtype=torch.long, device=grid.device)
        return Block(grid, rows=first, columns=first)

    def cut(self, tensor: Tensor) -> Tensor:
        """This block of a (1 or B, 1 or H, 1 or L, 1 or S) tensor; a view for slices."""
        for dim, index in enumerate((self.batch, self.heads, self.rows, self.columns)):
            tensor = take(tensor, dim, index)
        return tensor


def take(tensor: Tensor, dim: int, index: Index) -> Tensor:
    """Select along one dimension. A dimension of size 1 broadcasts, and stays as it is."""
    if tensor.shape[dim] == 1:
        return tensor
    if isinstance(index, Tensor):
        return tensor.index_select(dim, index)  # a copy
    if index == ALL:
        return tensor
    return tensor[(ALL,) * dim + (index,)]  # a view, through which gradients of biases are added


def ends_of(index: slice, length: int) -> tuple[int, int]:
    """First and one past the last number of a slice of a dimension."""
    return (0, length) if index == ALL else (index.start, index.stop)


def _indices(index: Index, length: int, device: torch.device) -> Tensor:
    return index if isinstance(index, Tensor) else torch.arange(*ends_of(index, length), device=device)


def as_positions(name: str, positions: object, *, per_head: bool = False) -> Tensor | int | None:
    """Read positions: an int stays an int, and a tensor (n,) or (B, n) becomes int64 (1 or B, n).

    Args:
        name: of the argument.
        positions: the argument.
        per_head: whether (B, H, n) is allowed too; its shape stays.
    """
    if positions is None:
        return None
    shapes = "(n,), (B, n) or (B, H, n)" if per_head else "(n,) or (B, n)"
    if isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
        return integer(name, positions, least=0, expected="a first position ≥ 0")
    expected = f"an int, or an integer tensor {shapes}"
    positions = strided(name, positions, expected, dtypes=INTEGERS)
    if positions.dim() not in ((1, 2, 3) if per_head else (1, 2)):
        raise ShapeError(name, expected=f"shape {shapes}", got=shape_text(positions.shape))
    # int64, because a window added to small or unsigned integers overflows.
    return (positions[None] if positions.dim() == 1 else positions).long()


def require_fit(name: str, positions: Tensor, batch: int, length: int, heads: int | None = None) -> None:
    """Raise unless positions have the shape (n,), (1 or B, n) or (B, H, n) of a call."""
    shape = positions.shape
    fits = shape[-1] == length and (len(shape) == 1 or shape[0] == 1 or shape[0] == batch)
    if not fits or (len(shape) == 3 and shape[1] != heads):
        per_head = "" if heads is None else f" or ({batch}, {heads}, {length})"
        expected = f"shape ({length},) or ({batch}, {length}){per_head}"
        fix = "Give every query, or every key, its absolute position."
        raise ShapeError(name, expected=expected, got=shape_text(shape), fix=fix)
