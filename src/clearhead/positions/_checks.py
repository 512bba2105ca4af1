"""Checks of the arguments of position parts."""

from __future__ import annotations

import math

import torch

from .._checks import number
from .._environment import has_values, reads_values
from ..errors import ArgumentError, ShapeError
from ..masks._grid import Grid


def positive(name: str, value: object, above: float = 0) -> float:
    """A finite number greater than `above`."""
    return number(name, value, f"a finite number > {above:g}", lambda x: above < x < math.inf)


def factor_at_least_one(value: object) -> float:
    """The factor of a scaling, by which the context grows."""
    return number("factor", value, "a finite number ≥ 1", lambda x: 1 <= x < math.inf)


def require_heads(name: str, num_heads: int, grid: Grid) -> None:
    """Raise unless a per-head mask has as many heads as the call."""
    if grid.num_heads != num_heads:
        expected = f"num_heads = {grid.num_heads}, the query's head count H"
        fix = "Grouped heads count too: give the number of query heads, not of key/value heads."
        raise ShapeError(f"mask {name}(num_heads={num_heads})", expected=expected, got=str(num_heads), fix=fix)


def require_in_range(positions: torch.Tensor) -> None:
    """Raise for positions below −1."""
    if positions.numel() == 0 or not has_values() or not reads_values(positions):
        return
    lowest = int(positions.min())
    if lowest < -1:
        fix = "Positions count from 0, the first token of a sequence."
        raise ArgumentError("positions", expected="positions ≥ 0, or −1 for padding", got=str(lowest), fix=fix)
