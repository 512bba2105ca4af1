"""`attention_weights`: the exact weights of chosen queries, computed in blocks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._call.call import Call, build_call
from ._checks import FLOATS, INTEGERS, flag, items, require_slice, shown, strided, with_values
from ._environment import autocast_off, cast_for_autocast, is_tracing
from ._proxies import recorded_call
from .errors import ArgumentError, ClearheadError, DTypeError
from .kernels._weights import compute_weights
from .masks._base import Mask
from .masks._tensors import as_mask

Queries = int | slice | Sequence[int] | Tensor


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    queries: Queries | None = None,
    average_attn_weights: bool = False,
) -> Tensor:
    """The weights p of `attention`, before dropout, for all queries or chosen ones.

    ::

        p_ij = exp(s_ij − lse_i),  zero where masked;  p_i = 0 for a fully masked query

    Rows are computed from query and key in blocks, so an average over heads needs no (B, H, L, S) tensor. Gradients
    flow into query, key, sinks and biases.

    Args:
        query: (B, H, L, D), or (H, L, D) without a batch.
        key: (B, Hkv, S, D).
        mask, scale, softcap, sinks, query_positions, key_positions: as for `attention`.
        queries: the chosen rows: an index, a slice, a list of indices or an integer or bool tensor (L,). Default all.
        average_attn_weights: average over the heads. Default False.

    Returns:
        (B, H, n, S), or (B, n, S) if averaged. n is the number of chosen queries (1 for an int). The dtype is float32,
        or float64 for float64 inputs. Unbatched inputs return unbatched weights.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError, MaskTypeError: as `attention`, and for a wrong index.

    Example:
        >>> import torch, clearhead
        >>> query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
        >>> clearhead.attention_weights(query, key, queries=[0, 3], average_attn_weights=True).shape
        torch.Size([2, 2, 7])
    """
    query, key = cast_for_autocast(query, key)
    average_attn_weights = flag("average_attn_weights", average_attn_weights)
    with autocast_off(query):
        try:
            positions: dict[str, Any] = {"query_positions": query_positions, "key_positions": key_positions}
            call = build_call(Call(query, key, key, as_mask(mask), scale, softcap, sinks, **positions))
        except ClearheadError as error:
            return recorded_call(attention_weights, error, locals())
        weights = compute_weights(call, row_numbers(queries, call.grid.query_length), average_attn_weights)
    return weights.squeeze(0) if query.dim() == 3 else weights


def checked_queries(name: str, queries: Queries | None) -> Queries | None:
    """Check chosen queries, whatever the length L. An iterator becomes a list.

    Raises:
        DTypeError: for anything but an int, a slice, or a list or tensor of row numbers.
    """
    if queries is None:
        return None
    if isinstance(queries, Tensor):
        return _row_tensor(name, queries)
    if isinstance(queries, slice):
        require_slice(name, queries)
        return queries
    expected = "an int, a slice or a list of row numbers"
    if isinstance(queries, int) and not isinstance(queries, bool):
        return queries
    if isinstance(queries, (bool, dict)):
        raise DTypeError(name, expected=expected, got=shown(queries))
    numbers = items(name, queries, expected)
    for number in numbers:
        row = number.item() if isinstance(number, Tensor) and number.dim() == 0 and not number.is_meta else number
        if isinstance(row, bool) or not hasattr(row, "__index__") or getattr(row, "ndim", 0) != 0:
            raise DTypeError(name, expected=expected, got=shown(queries))
    return [operator.index(number) for number in numbers]


def _row_tensor(name: str, rows: Tensor) -> Tensor:
    expected = "an int, a slice or a list of row numbers"
    rows = with_values(name, strided(name, rows, expected))
    empty = rows.numel() == 0 and rows.dtype in FLOATS
    if rows.dim() > 1 or not (empty or rows.dtype == torch.bool or rows.dtype in INTEGERS):
        raise DTypeError(name, expected=expected, got=shown(rows))
    return rows.long() if empty else rows


def row_numbers(
    queries: Queries | None, length: int, name: str = "queries", below: str = "row numbers below L ="
) -> Tensor | None:
    """The chosen row numbers, 0 … L−1, as a tensor."""
    chosen = checked_queries(name, queries)
    if chosen is None:
        return None
    if isinstance(chosen, slice):
        return torch.tensor(range(length)[chosen], dtype=torch.int64, device="cpu")
    if isinstance(chosen, Tensor) and chosen.dtype == torch.bool:
        if tuple(chosen.shape) != (length,):
            raise ArgumentError(name, expected=f"a bool tensor ({length},)", got=f"{tuple(chosen.shape)}")
        return chosen.nonzero().squeeze(-1)
    if isinstance(chosen, Tensor):
        rows = chosen.reshape(-1).long()
        fits = is_tracing() or rows.numel() == 0 or bool(((rows >= -length) & (rows < length)).all())
        got = "" if fits else str(rows.tolist())
    else:
        numbers = [chosen] if isinstance(chosen, int) else list(chosen)
        fits, got = all(-length <= number < length for number in numbers), shown(numbers)
        rows = torch.tensor(numbers if fits else [], dtype=torch.int64, device="cpu")
    if not fits:
        raise ArgumentError(name, expected=f"{below} {length}", got=got)
    return torch.where(rows < 0, rows + length, rows)
