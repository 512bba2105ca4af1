"""The coverage of a mask in one pass over its tensors, by the native extension where it was built."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import PLAIN
from .._environment import is_tracing, is_transformed
from .._native import extension
from .._torch_private import dispatch_modes
from ._grid import Grid
from ._structure import Band, Structure

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


def find_natively(structure: Structure, grid: Grid) -> Found | None:
    """Which queries see a key, and which keys are seen.

    Returns:
        ``None`` where another search is needed: for structures that are not exact or have ranges of columns per row,
        and where values are not those of plain tensors.
    """
    # The extension reads memory, which only plain tensors outside of any mode or transform are.
    if extension is None or grid.device.type != "cpu" or is_tracing() or is_transformed() or dispatch_modes() > 0:
        return None
    tensors = _tensors(structure)
    if not tensors or len(tensors) > extension.MOST_MASKS or not all(map(_is_plain, tensors)):
        return None
    band = structure.band or Band.whole(grid)
    # As large as the tensors differ: one answer serves all items and heads that share a mask.
    batch, heads = max(tensor.shape[0] for tensor in tensors), max(tensor.shape[1] for tensor in tensors)
    queries = torch.empty(batch, heads, grid.query_length, dtype=torch.bool)
    keys = torch.empty(batch, heads, grid.key_length, dtype=torch.bool)
    sizes = (batch, heads, grid.query_length, grid.key_length, band.low, band.high, band.stop)
    numbers = [number for tensor in tensors for number in _cells(tensor)]
    masked_row, masked_key = extension.coverage(*sizes, queries.data_ptr(), keys.data_ptr(), *numbers)
    return queries if masked_row else None, keys if masked_key else None


def _tensors(structure: Structure) -> list[Tensor]:
    """What hides besides the band, (1 or B, 1 or H, 1 or L, 1 or S) each; none where that is not known."""
    if not structure.exact or structure.rows is not None:
        return []
    found = [*structure.tensors, *structure.biases]
    if structure.queries is not None:
        found.append(structure.queries[:, None, :, None])
    if structure.keys is not None:
        found.append(structure.keys[:, None, None, :])
    return found


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.dtype in _HIDING and not tensor.is_neg()


def _cells(tensor: Tensor) -> tuple[int, ...]:
    # A stride of 0 broadcasts, so that the loop in C++ has one form.
    steps = (0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), *_HIDING[tensor.dtype], *steps)
