"""Texts end to end in one row (1, T), with the boundaries that transformers hands to every attention layer."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from .._call.sequences import PackedSequences, read_sequences
from ..errors import ShapeError, shape_text

_ROWS = "_clearhead_rows"


def boundaries_of(rows: PackedSequences) -> Tensor:
    """The boundaries (n + 1,) of texts, which `rows_of` need not read again in every layer."""
    setattr(rows.cu_seqlens_q, _ROWS, rows)
    return rows.cu_seqlens_q


def rows_of(query: Tensor, key: Tensor, starts_q: Tensor | None, starts_k: Tensor | None) -> PackedSequences | None:
    """Read the boundaries of packed (1, H, T, D) queries and (1, Hkv, T, D) keys; ``None`` where there are none.

    Raises:
        ShapeError: for boundaries of queries or keys alone, for different ones, and for more than one row.
        ArgumentError, DTypeError, DeviceError: as for `clearhead.attention_varlen`.
    """
    if starts_q is None and starts_k is None:
        return None
    known: PackedSequences | None = getattr(starts_q, _ROWS, None)
    if known is not None and starts_k is starts_q and known.tokens == (query.shape[2], key.shape[2]):
        return known
    if starts_q is None or starts_k is None or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        _refuse(query, key)
    rows = read_sequences(_beside(query, starts_q), _beside(query, starts_k), query[0, 0], key[0, 0])
    if rows.queries != rows.keys:
        _refuse(query, key)
    return rows


def _beside(query: Tensor, starts: Tensor) -> Tensor:
    # A tensor without data has none to move; it is refused with the other checks.
    return starts.to(query.device) if isinstance(starts, Tensor) and not starts.is_meta else starts


def _refuse(query: Tensor, key: Tensor) -> NoReturn:
    raise ShapeError(
        "cu_seq_lens_q, cu_seq_lens_k",
        expected="the same boundaries for queries and keys, one packed row (B = 1, L = S)",
        got=f"query {shape_text(query.shape)}, key {shape_text(key.shape)}",
        fix="Pass position_ids or an attention_mask instead.",
    )
