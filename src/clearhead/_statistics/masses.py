"""`Mass`: the keys whose weights a mass sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import INTEGERS, LARGEST, integer, items, kind, strided, with_values
from ..errors import ArgumentError, ShapeError, shape_text
from ..masks._grid import Block, Grid, take

_FAR = 1 << 40  # limits nothing


class Mass(NamedTuple):
    """The keys of one mass: those at some distances from the query, with the query's label.

    Without `query_labels` every query has label 0. A key with a negative label is in no mass, so
    ``key_labels=is_special.int() - 1`` chooses keys by themselves.

    Args:
        low: lowest position of the key relative to the query. Default: no limit.
        high: highest one. Default: no limit.
        query_labels: integers (L,) or (B, L), the label of each query. Default 0.
        key_labels: integers (S,) or (B, S). Default: keys count whatever their label.

    Example:
        >>> import torch
        >>> tokens = torch.tensor([[7, 8, 7]])
        >>> Mass(-1, -1)  # the previous token
        Mass(low=-1, high=-1, query_labels=None, key_labels=None)
        >>> duplicate = Mass(high=-1, query_labels=tokens, key_labels=tokens)  # the same token, earlier
    """

    low: int | None = None
    high: int | None = None
    query_labels: Tensor | None = None
    key_labels: Tensor | None = None

    @property
    def ends(self) -> tuple[int, int]:
        """Lowest and highest distance as numbers."""
        return -_FAR if self.low is None else self.low, _FAR if self.high is None else self.high


@dataclass(eq=False)
class Masses:
    """The masses of a call, as kernels read them.

    Args:
        each: the masses.
    """

    each: tuple[Mass, ...] = ()

    def __post_init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def labels(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Labels of queries (M, B, L) and keys (M, B, S), int32. The calls of one batch share them."""
        sizes = grid.batch_size, grid.query_length, grid.key_length
        found = self._made.get((*sizes, grid.device))
        if found is None:
            batch, *lengths = sizes
            # Equal negative labels would meet, so those of the two sides differ.
            sides = [
                torch.stack([_row(labels, (batch, length), none, grid.device) for labels in of_side])
                for of_side, length, none in (
                    ([mass.query_labels for mass in self.each], lengths[0], -1),
                    ([mass.key_labels for mass in self.each], lengths[1], -2),
                )
            ]
            found = self._made[(*sizes, grid.device)] = (sides[0], sides[1])
        return found

    def inside(self, block: Block) -> list[Tensor]:
        """The cells of each mass, bool, broadcasting to the block's (b, h, l, s)."""
        queries, keys = self.labels(block.grid)
        cells: list[Tensor] = []
        for place, mass in enumerate(self.each):
            low, high = mass.ends
            distance = block.k - block.q  # (1 or b, 1 or h, l, s)
            found = (distance >= low) & (distance <= high)
            if mass.key_labels is not None:
                of_queries = take(queries[place][:, None, :, None], 0, block.batch)
                of_keys = take(keys[place][:, None, None], 0, block.batch)
                found = found & (take(of_queries, 2, block.rows) == take(of_keys, 3, block.columns))
            cells.append(found)
        return cells


def _row(labels: Tensor | None, shape: tuple[int, int], none: int, device: torch.device) -> Tensor:
    """Labels (B, n) as int32, with `none` for negative ones."""
    if labels is None:
        return torch.zeros(shape, dtype=torch.int32, device=device)
    labels = labels.to(device)
    return labels.where(labels >= 0, none).int().expand(shape)


def make_masses(masses: Sequence[Mass]) -> Masses:
    """Check masses.

    Raises:
        DTypeError, ArgumentError: for anything but masses, and for other numbers.
    """
    expected = "a list of clearhead.Mass"
    given = items("masses", masses, expected)
    for mass in given:
        if not isinstance(mass, Mass):
            raise ArgumentError("masses", expected=expected, got=kind(mass))
        for name in ("low", "high"):
            if getattr(mass, name) is not None:
                integer(name, getattr(mass, name), least=-LARGEST)
        for name, labels in (("query_labels", mass.query_labels), ("key_labels", mass.key_labels)):
            if labels is not None:
                _require_labels(name, labels)
        if mass.query_labels is not None and mass.key_labels is None:
            raise ArgumentError("query_labels", expected="key_labels beside it", got="none", fix="Pass both.")
    return Masses(tuple(given))


def _require_labels(name: str, labels: Tensor) -> None:
    with_values(name, strided(name, labels, "an integer tensor", dtypes=INTEGERS))
    if labels.dim() not in (1, 2):
        raise ShapeError(name, expected="shape (n,) or (B, n)", got=shape_text(labels.shape))
    if labels.numel() and int(labels.max()) > LARGEST:
        raise ArgumentError(name, expected=f"labels of at most {LARGEST}", got=str(int(labels.max())))


def require_fitting(masses: Masses, grid: Grid) -> None:
    """Raise `ShapeError` unless labels have the sizes of a call."""
    for mass in masses.each:
        sides = (
            ("query_labels", mass.query_labels, grid.query_length),
            ("key_labels", mass.key_labels, grid.key_length),
        )
        for name, labels, length in sides:
            if labels is None:
                continue
            if labels.shape[-1] != length or (labels.dim() == 2 and labels.shape[0] not in (1, grid.batch_size)):
                expected = f"({length},) or ({grid.batch_size}, {length})"
                raise ShapeError(name, expected=expected, got=shape_text(labels.shape))
