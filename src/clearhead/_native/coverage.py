"""The search for the coverage of a mask in C++, which reads stored tensors in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import PLAIN
from .._torch_private import dispatch_modes
from . import extension, require_declared

#: The bytes of a cell, and the bits of a cell that hides, as a signed integer.
_HIDING = {
    torch.bool: (1, 0),
    torch.float32: (4, 0xFF800000),
    torch.bfloat16: (2, 0xFF80),
    torch.float16: (2, 0xFC00),
    torch.float64: (8, 0xFFF0000000000000 - (1 << 64)),
}
_ARGUMENTS = "batch heads rows keys low high stop rows_seen keys_seen data bytes hidden batch head row column"
require_declared("coverage_arguments", *_ARGUMENTS.split())  # those of the search, then those of each tensor (`_cells`)


def find_coverage(
    tensors: list[Tensor], length: int, count: int, band: tuple[int, int, int]
) -> tuple[Tensor | None, Tensor | None] | None:
    """The queries with a visible key, (1 or B, 1 or H, L), and the keys visible to a query, (1 or B, 1 or H, S).

    Args:
        tensors: (1 or B, 1 or H, 1 or L, 1 or S) each: bools, and biases that hide with −∞.
        length, count: L and S.
        band: key j can be visible to query i if i + low ≤ j ≤ i + high and j < stop.

    Returns:
        Two bool tensors, each ``None`` for all. Or ``None`` if the extension cannot read the tensors.
    """
    # The extension reads memory, so it needs plain tensors outside of modes.
    if extension is None or dispatch_modes() > 0 or not tensors or len(tensors) > extension.MOST_MASKS:
        return None
    if not all(map(_is_plain, tensors)):
        return None
    # One result for all items and heads that share the mask.
    batch, heads = max(tensor.shape[0] for tensor in tensors), max(tensor.shape[1] for tensor in tensors)
    queries = tensors[0].new_empty((batch, heads, length), dtype=torch.bool)
    keys = tensors[0].new_empty((batch, heads, count), dtype=torch.bool)
    numbers = [number for tensor in tensors for number in _cells(tensor)]
    results = queries.data_ptr(), keys.data_ptr()
    masked_row, masked_key = extension.coverage(batch, heads, length, count, *band, *results, *numbers)
    return queries if masked_row else None, keys if masked_key else None


def _is_plain(tensor: Tensor) -> bool:
    is_stored = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg()
    return type(tensor) in PLAIN and is_stored and tensor.dtype in _HIDING


def _cells(tensor: Tensor) -> tuple[int, ...]:
    # A stride of 0 broadcasts, so one loop in C++ is enough.
    strides = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), *_HIDING[tensor.dtype], *strides)
