"""Checks of the sizes and numbers that position parts are made with."""

from __future__ import annotations

import math

import torch

from .._checks import number
from .._environment import is_tracing, is_transformed
from ..errors import ArgumentError, DeviceError, ShapeError
from ..masks._grid import Grid


def positive(name: str, value: object, above: float = 0) -> float:
    """A finite number greater than `above`."""
    return number(name, value, f"a finite number > {above:g}", lambda given: above < given < math.inf)


def factor_at_least_one(value: object) -> float:
    """A scaling's factor, by how much the context grows."""
    return number("factor", value, "a finite number ≥ 1", lambda given: 1 <= given < math.inf)


def require_heads(name: str, num_heads: int, grid: Grid) -> None:
    """Raise unless a per-head mask was made for as many heads as the call has."""
    if grid.num_heads != num_heads:
        raise ShapeError(
            f"mask {name}(num_heads={num_heads})",
            expected=f"num_heads = {grid.num_heads}, the query's head count H",
            got=str(num_heads),
            fix="Grouped heads count too: give the number of query heads, not of key/value heads.",
        )


def require_device(name: str, tensor: torch.Tensor, grid: Grid) -> None:
    """Raise unless a mask's tensor lives where the call does."""
    if tensor.device != grid.device:
        raise DeviceError(
            f"mask {name}(...)",
            expected=f"weights on {grid.device}, like query",
            got=f"weights on {tensor.device}",
            fix=f"Move it with .to({str(grid.device)!r}).",
        )


def require_in_range(positions: torch.Tensor) -> None:
    """Raise for positions below −1, where looking at them waits for no device."""
    if is_tracing() or is_transformed() or positions.device.type != "cpu" or positions.numel() == 0:
        return
    lowest = int(positions.min())
    if lowest < -1:
        raise ArgumentError(
            "positions",
            expected="positions ≥ 0, or −1 for padding",
            got=str(lowest),
            fix="Positions count from 0, the first token of a sequence.",
        )
