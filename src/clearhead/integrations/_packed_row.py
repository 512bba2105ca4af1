"""Packed sequences in one row (1, T), with the boundaries that transformers passes to every attention layer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from .._call.sequences import PackedSequences, read_sequences
from ..errors import ShapeError, shape_text

_SEQUENCES = "_clearhead_sequences"


@dataclass(frozen=True)
class Row:
    """The texts of a batch in one row, for layers that transformers does not pass boundaries to.

    Args:
        boundaries: (n + 1,), of `boundaries_of`.
        positions: (T,), of each token in its text.
        slices: of each text.
        longest: the most tokens of a text.
    """

    boundaries: Tensor
    positions: Tensor
    slices: tuple[slice, ...]
    longest: int

    def get_seq_length(self) -> int:
        """No tokens before the row: XLM and Flaubert receive it where they expect a cache."""
        return 0


class _Running(threading.local):
    """What runs in this thread: the packed row of an encoder, and whether the loss of a head includes padding."""

    packed: Any = None
    labels_padding: bool = False


running = _Running()


def boundaries_of(sequences: PackedSequences) -> Tensor:
    """The boundaries (n + 1,) of packed sequences. They carry `sequences`, which `sequences_of` then need not read."""
    setattr(sequences.cu_seqlens_q, _SEQUENCES, sequences)
    return sequences.cu_seqlens_q


def sequences_of(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> PackedSequences | None:
    """Read the boundaries of packed (1, H, T, D) queries and (1, Hkv, T, D) keys. ``None`` if a call has none."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    known: PackedSequences | None = getattr(cu_seqlens_q, _SEQUENCES, None)
    if known is not None and cu_seqlens_k is cu_seqlens_q and known.tokens == (query.shape[2], key.shape[2]):
        return known
    if cu_seqlens_q is None or cu_seqlens_k is None or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        _refuse(query, key)
    moved_q = _moved(cu_seqlens_q, query)
    moved_k = moved_q if cu_seqlens_k is cu_seqlens_q else _moved(cu_seqlens_k, query)
    sequences = read_sequences(moved_q, moved_k, query[0].transpose(0, 1), key[0].transpose(0, 1))
    if sequences.queries != sequences.keys:
        _refuse(query, key)
    return sequences


def _moved(cu_seqlens: Tensor, query: Tensor) -> Tensor:
    # A tensor without data cannot move. `read_sequences` refuses it.
    return cu_seqlens.to(query.device) if isinstance(cu_seqlens, Tensor) and not cu_seqlens.is_meta else cu_seqlens


def _refuse(query: Tensor, key: Tensor) -> NoReturn:
    expected = "the same boundaries for queries and keys, one packed row (B = 1, L = S)"
    got = f"query {shape_text(query.shape)}, key {shape_text(key.shape)}"
    fix = "Pass position_ids or an attention_mask instead."
    raise ShapeError("cu_seq_lens_q, cu_seq_lens_k", expected=expected, got=got, fix=fix)
