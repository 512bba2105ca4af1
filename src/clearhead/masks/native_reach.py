"""Finding who takes part in one pass over the tensors of a mask, by the native extension where it was built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from ..native import extension
from ..tracing import is_tracing, is_transformed
from .band import Band, band_of
from .base import Mask
from .grid import Block, Grid

__all__ = ["Found", "Search", "find_natively"]

#: Bool (1 or B, 1 or H, L) of queries that see a key and (1 or B, 1 or H, S) of keys that are seen; ``None`` for all.
Found = tuple[Tensor | None, Tensor | None]

_MOST_MASKS = 4  # as many as native/reach.h has room for
#: Bytes of a cell and the bits of one that hides, as a whole number with a sign.
_HIDING = {
    torch.bool: (1, 0),
    torch.float32: (4, 0xFF800000),
    torch.bfloat16: (2, 0xFF80),
    torch.float16: (2, 0xFC00),
    torch.float64: (8, 0xFFF0000000000000 - (1 << 64)),
}


def find_natively(mask: Mask, grid: Grid) -> Found | None:
    """Who takes part.

    Returns:
        ``None`` where something else has to look: for masks that are not only tensors and rules about positions, and
        where values are not those of plain tensors.
    """
    if extension is None or grid.device.type != "cpu" or is_tracing() or is_transformed():
        return None
    if torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        return None
    parts = _parts(mask, grid)
    if parts is None or len(parts[1]) > _MOST_MASKS or not all(map(_is_plain, parts[1])):
        return None
    return Search((grid.query_length, grid.key_length), *parts).find(parts[1])


@final
class Search:
    """What is the same for all masks of tensors of the same sizes and strides.

    Args:
        lengths: L and S.
        band: what rules about positions leave.
        tensors: the others' (1 or B, 1 or H, 1 or L, 1 or S).
    """

    def __init__(self, lengths: tuple[int, int], band: Band, tensors: Sequence[Tensor]) -> None:
        batch, heads = max(tensor.shape[0] for tensor in tensors), max(tensor.shape[1] for tensor in tensors)
        self._queries, self._keys = (batch, heads, lengths[0]), (batch, heads, lengths[1])
        self._sizes = (batch, heads, *lengths, band.low, band.high, band.stop)
        self._cells = [(*_HIDING[tensor.dtype], *_steps(tensor)) for tensor in tensors]
        self._reach = cast(Any, extension).reach

    def find(self, tensors: Sequence[Tensor]) -> Found:
        """Look at such tensors, or at others that their views begin with."""
        queries, keys = torch.empty(self._queries, dtype=torch.bool), torch.empty(self._keys, dtype=torch.bool)
        numbers: list[int] = []
        for tensor, cells in zip(tensors, self._cells, strict=True):
            numbers += (tensor.data_ptr(), *cells)
        blind, unseen = self._reach(*self._sizes, queries.data_ptr(), keys.data_ptr(), *numbers)
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


def _steps(tensor: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
