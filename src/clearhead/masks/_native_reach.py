"""The coverage of a mask in one pass over its tensors, by the native extension where it was built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._environment import is_dispatching, is_tracing, is_transformed
from .._native import extension
from ._band import Band, band_of
from ._base import Mask
from ._grid import Block, Grid

__all__ = ["Found", "find_natively"]

#: Bool (1 or B, 1 or H, L) of queries that see a key and (1 or B, 1 or H, S) of keys that are seen; ``None`` for all.
Found = tuple[Tensor | None, Tensor | None]

#: Bytes of a cell and the bits of one that hides, as a whole number with a sign.
_HIDING = {
    torch.bool: (1, 0),
    torch.float32: (4, 0xFF800000),
    torch.bfloat16: (2, 0xFF80),
    torch.float16: (2, 0xFC00),
    torch.float64: (8, 0xFFF0000000000000 - (1 << 64)),
}


def find_natively(mask: Mask, grid: Grid) -> Found | None:
    """Which queries see a key, and which keys are seen.

    Returns:
        ``None`` where it has to be found otherwise: for masks that are not only tensors and rules about positions, and
        where values are not those of plain tensors.
    """
    if extension is None or grid.device.type != "cpu" or is_tracing() or is_transformed() or is_dispatching():
        return None
    parts = _parts(mask, grid)
    if parts is None or len(parts[1]) > extension.MOST_MASKS or not all(map(_is_plain, parts[1])):
        return None
    band, tensors = parts
    batch, heads = max(tensor.shape[0] for tensor in tensors), max(tensor.shape[1] for tensor in tensors)
    queries = torch.empty(batch, heads, grid.query_length, dtype=torch.bool)
    keys = torch.empty(batch, heads, grid.key_length, dtype=torch.bool)
    sizes = (batch, heads, grid.query_length, grid.key_length, band.low, band.high, band.stop)
    numbers = [number for tensor in tensors for number in _cells(tensor)]
    blind, unseen = extension.coverage(*sizes, queries.data_ptr(), keys.data_ptr(), *numbers)
    return queries if blind else None, keys if unseen else None


def _parts(mask: Mask, grid: Grid) -> tuple[Band, list[Tensor]] | None:
    """What the rules about positions leave, and the tensors (1 or B, 1 or H, 1 or L, 1 or S)."""
    band, tensors = Band(-grid.query_length, grid.key_length, grid.key_length), []
    for part in mask.parts():
        if part.is_tensor:
            tensors.append(_tensor(part, grid))
            continue
        of_part = band_of(part, grid)
        if of_part is None:
            return None
        band = band.meet(of_part.low, of_part.high, of_part.stop)
    return (band, tensors) if tensors else None


def _tensor(part: Mask, grid: Grid) -> Any:
    biases = part.bias_tensors()
    return part.bias(Block(grid), biases[0].dtype) if biases else part.visible(Block(grid))


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter:
        return False
    return tensor.layout is torch.strided and tensor.dtype in _HIDING and not tensor.is_neg()


def _cells(tensor: Tensor) -> tuple[int, ...]:
    steps = (0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), *_HIDING[tensor.dtype], *steps)
