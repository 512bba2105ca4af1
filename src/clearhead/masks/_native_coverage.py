"""The coverage of a mask in one pass over its tensors, by the native extension."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import PLAIN
from .._native import extension
from .._torch_private import dispatch_modes
from ._grid import Grid
from ._structure import Band, Structure

#: The bytes of a cell, and the bits of a cell that hides, as a signed integer.
_HIDING = {
    torch.bool: (1, 0),
    torch.float32: (4, 0xFF800000),
    torch.bfloat16: (2, 0xFF80),
    torch.float16: (2, 0xFC00),
    torch.float64: (8, 0xFFF0000000000000 - (1 << 64)),
}


def find_natively(structure: Structure, grid: Grid) -> tuple[Tensor | None, Tensor | None] | None:
    """The queries with a visible key, (1 or B, 1 or H, L), and the keys visible to a query, (1 or B, 1 or H, S).

    Returns:
        Two bool tensors, each ``None`` for all. Or ``None`` if the extension cannot read the mask: if the structure is
        inexact or has ranges of columns per row, or if a tensor is not plain.
    """
    # The extension reads memory, so it needs plain tensors outside of modes.
    if extension is None or grid.device.type != "cpu" or dispatch_modes() > 0:
        return None
    tensors = _tensors(structure)
    if not tensors or len(tensors) > extension.MOST_MASKS or not all(map(_is_plain, tensors)):
        return None
    band = structure.band or Band.whole(grid)
    # One result for all items and heads that share the mask.
    batch, heads = max(tensor.shape[0] for tensor in tensors), max(tensor.shape[1] for tensor in tensors)
    queries = torch.empty(batch, heads, grid.query_length, dtype=torch.bool)
    keys = torch.empty(batch, heads, grid.key_length, dtype=torch.bool)
    sizes = (batch, heads, grid.query_length, grid.key_length, band.low, band.high, band.stop)
    numbers = [number for tensor in tensors for number in _cells(tensor)]
    masked_row, masked_key = extension.coverage(*sizes, queries.data_ptr(), keys.data_ptr(), *numbers)
    return queries if masked_row else None, keys if masked_key else None


def _tensors(structure: Structure) -> list[Tensor]:
    """All tensors of a structure, (1 or B, 1 or H, 1 or L, 1 or S) each; none if they are not all of the mask."""
    if not structure.exact or structure.rows is not None:
        return []
    tensors = [*structure.tensors, *structure.biases]
    if structure.queries is not None:
        tensors.append(structure.queries[:, None, :, None])
    if structure.keys is not None:
        tensors.append(structure.keys[:, None, None, :])
    return tensors


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.dtype in _HIDING and not tensor.is_neg()


def _cells(tensor: Tensor) -> tuple[int, ...]:
    # A stride of 0 broadcasts, so one loop in C++ is enough.
    strides = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), *_HIDING[tensor.dtype], *strides)
