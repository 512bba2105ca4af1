"""The one table of sizes of tiles, by kernel, size of a head, dtype and compute capability."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._operands import Operands

#: Compute capabilities, beside 12.x, whose multiprocessors have 100 KB of shared memory; 8.0, 9.0 and 10.0 have more.
_SMALL = ((8, 6), (8, 9))


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


def tiles_of(kernel: str, dim: int, dtype: torch.dtype, capability: tuple[int, int], *, plain: bool) -> Tiles:
    """The tiles of a kernel on a device of this compute capability.

    Args:
        kernel: ``"rows"``, ``"columns"``, ``"top"``, ``"weights"``, ``"averaged"``, ``"map"``, ``"dq"``
            or ``"dk"``.
        dim: features of a head.
        dtype: of query and key.
        capability: compute capability, such as (9, 0).
        plain: whether the mask is no more than a band, without a soft-cap.
    """
    width = block_of(dim)
    if kernel in ("dq", "dk"):
        return _of_gradient(kernel, width, dtype)
    if dtype == torch.float32:  # multiplied without matrix instructions, from registers
        return _of_float32(kernel, width, capability)
    if kernel == "top":
        return _of_top(width, capability, plain)
    if kernel in ("weights", "averaged", "map"):
        return _of_weights(kernel, width, capability)
    if width > 128:
        return Tiles(64 if kernel == "rows" else 32, 32, 4, 2)
    if plain and capability[0] == 9:
        return Tiles(64, 128, 4, 3) if kernel == "rows" else Tiles(128, 64, 4, 3)
    if plain and kernel == "rows" and capability[0] == 10:
        return Tiles(128, 64, 8, 2)
    keys = 64 if kernel == "rows" and width <= 64 else 32
    return Tiles(64, keys, 4, 1 if keys == 64 and capability[0] == 12 else 2)


def _of_float32(kernel: str, width: int, capability: tuple[int, int]) -> Tiles:
    # In larger tiles these spill registers.
    if kernel in ("weights", "averaged") and width > 64:
        return Tiles(32, 32 if width > 128 and capability in _SMALL else 16, 8, 1)
    if width > 64 and capability[0] == 12:
        return Tiles(16, 32, 8, 1)
    if kernel in ("weights", "averaged", "map"):
        return Tiles(16 if kernel == "map" and width > 128 else 32, 32, 8, 1)
    if kernel == "columns":
        return Tiles(16 if width > 128 else 32, 32, 8, 1)
    return Tiles(16, 32, 4 if width <= 64 else 8, 1)


def _of_top(width: int, capability: tuple[int, int], plain: bool) -> Tiles:
    if plain and width <= 128 and capability[0] == 9:
        return Tiles(64, 64, 4, 3)
    keys = 64 if width <= 64 or (plain and width <= 128) else 32
    # With more stages they spill registers there.
    return Tiles(64, keys, 4, 1 if capability in _SMALL or capability[0] >= 10 else 2)


def _of_weights(kernel: str, width: int, capability: tuple[int, int]) -> Tiles:
    if width > 128:
        return Tiles(32, 32, 8, 1)
    averaged = kernel == "averaged"
    few_keys = kernel == "map" or (averaged and width > 64)
    return Tiles(64, 32 if few_keys else 64, 4, 2 if averaged and capability[0] < 10 else 1)


def _of_gradient(kernel: str, width: int, dtype: torch.dtype) -> Tiles:
    of_query = kernel == "dq"
    if dtype == torch.float32:
        if width > 128:
            return Tiles(16, 16, 8, 1)
        return Tiles(16, 32, 8, 1) if of_query or width <= 64 else Tiles(32, 16, 8, 1)
    if width > 128:
        return Tiles(32 if of_query else 16, 32, 8, 1)
    return Tiles(32, 16 if of_query and width > 64 else 32, 4, 1)


def tiles_for(kernel: str, operands: Operands) -> Tiles:
    """The tiles of a kernel for a call, on the device of its query."""
    query = operands.query
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (8, 0)
    return tiles_of(kernel, query.shape[3], query.dtype, capability, plain=_is_plain(operands))


def _is_plain(operands: Operands) -> bool:
    """Whether the mask is no more than a band, without a soft-cap. Other calls need registers for the mask."""
    return operands.softcap == 0 and not any(isinstance(term, torch.Tensor) for term in operands.terms)


def block_of(dim: int) -> int:
    """The features of a tile: a power of two, at least 16."""
    return max(16, power_of_two(dim))


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def tiles_over(count: int, size: int) -> int:
    """How many tiles of this size cover so many rows."""
    return -(-count // size)
