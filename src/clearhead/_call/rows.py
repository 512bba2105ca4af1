"""Rows with running lengths: documents end to end, the representation of packed, padded and jagged batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from .._checks import strided, with_values
from .._environment import is_tracing
from ..errors import ArgumentError, DeviceError, DTypeError, ShapeError, shape_text
from ..masks._base import Mask
from ..masks._grid import Block, Grid
from ..masks._positional import Causal
from ..masks._prepared import PreparedMask
from ..masks._structure import UNKNOWN, RowRanges, Structure
from ..masks._tensors import as_mask


@dataclass(frozen=True)
class Rows:
    """Where the documents of T query tokens and Tk key tokens begin.

    Args:
        cu_seqlens_q, cu_seqlens_k: int64 (n + 1,), running lengths from 0 to T and to Tk.
        queries, keys: the same as numbers; empty while tracing.
        tokens: T and Tk.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    tokens: tuple[int, int]

    @property
    def count(self) -> int:
        """How many documents there are."""
        return self.cu_seqlens_q.shape[0] - 1

    @cached_property
    def query_documents(self) -> Tensor:
        """(T,) the document of every query."""
        return _documents(self.cu_seqlens_q, self.tokens[0])

    @cached_property
    def key_documents(self) -> Tensor:
        """(Tk,) the document of every key."""
        return _documents(self.cu_seqlens_k, self.tokens[1])

    @cached_property
    def query_positions(self) -> Tensor:
        """(T,) positions within each document."""
        return _positions(self.cu_seqlens_q, self.query_documents)

    @cached_property
    def key_positions(self) -> Tensor:
        """(Tk,) likewise."""
        return _positions(self.cu_seqlens_k, self.key_documents)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each document."""
        for (start, stop), (first, last) in zip(pairwise(self.queries), pairwise(self.keys), strict=True):
            yield slice(start, stop), slice(first, last)


def _documents(bounds: Tensor, tokens: int) -> Tensor:
    return torch.searchsorted(bounds, torch.arange(tokens, device=bounds.device), right=True) - 1


def _positions(bounds: Tensor, documents: Tensor) -> Tensor:
    return torch.arange(len(documents), device=bounds.device) - bounds[documents]


def read_rows(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, query: Tensor, key: Tensor) -> Rows:
    """Check the running lengths of packed queries (T, …) and keys (Tk, …)."""
    bounds = (
        _boundaries("cu_seqlens_q", cu_seqlens_q, "query", query),
        _boundaries("cu_seqlens_k", cu_seqlens_k, "key", key),
    )
    if len(bounds[0]) != len(bounds[1]):
        raise ArgumentError(
            "cu_seqlens_k",
            expected=f"as many documents as cu_seqlens_q has, {len(bounds[0]) - 1}",
            got=str(len(bounds[1]) - 1),
            fix="A document without keys repeats its boundary.",
        )
    tokens = (query.shape[0], key.shape[0])
    # A graph must hold for other boundaries: no document can be cut out of it.
    if is_tracing():
        return Rows(*bounds, (), (), tokens)
    queries = _checked("cu_seqlens_q", bounds[0], tokens[0])
    # Values are read once where they can be: an accelerator is waited for each time.
    same = cu_seqlens_k is cu_seqlens_q and tokens[0] == tokens[1]
    return Rows(*bounds, queries, queries if same else _checked("cu_seqlens_k", bounds[1], tokens[1]), tokens)


def require_within(mask: Mask | Tensor | None) -> Mask | None:
    """The mask of packed documents.

    Raises:
        ArgumentError: for ``causal("bottom_right")``, which has no corner to join here, and for a prepared mask.
    """
    if mask is None:
        return None
    checked = as_mask(mask)
    if isinstance(checked, PreparedMask):
        fix = "Pass the mask itself: within documents it counts from the first token of each."
        raise ArgumentError("mask", expected="a mask that is not prepared", got="prepare(...)", fix=fix)
    for part in checked.parts():
        if isinstance(part, Causal) and part.align != "top_left":
            fix = "Packed documents are causal from their first tokens: masks.causal()."
            raise ArgumentError("mask", expected="causal()", got=part.describe(), fix=fix)
    return checked


def within_rows(rows: Rows, mask: Mask | None) -> Mask:
    """A mask of the T × Tk scores: what `mask` shows within documents."""
    same = _SameDocument(rows)
    return same if mask is None else same & mask


@final
class _SameDocument(Mask):
    """Each query attends to the keys of its own sequence."""

    def __init__(self, rows: Rows) -> None:
        self._documents = rows

    def visible(self, block: Block) -> Tensor:
        rows = self._documents.query_documents[None, None, :, None]
        return block.cut(rows) == block.cut(self._documents.key_documents[None, None, None, :])

    def structure(self, grid: Grid) -> Structure:
        # In a graph nothing is known of the boundaries.
        if not self._documents.queries:
            return UNKNOWN
        bounds, documents = self._documents.cu_seqlens_k, self._documents.query_documents
        return Structure(rows=RowRanges(bounds[documents][None], bounds[documents + 1][None]))

    def describe(self) -> str:
        return f"same_document({self._documents.count})"


def _boundaries(name: str, bounds: object, what: str, x: Tensor) -> Tensor:
    expected = "an int32 or int64 tensor (n + 1,)"
    bounds = strided(name, bounds, expected)
    if bounds.dtype not in (torch.int32, torch.int64):
        raise DTypeError(name, expected=expected, got=str(bounds.dtype))
    if bounds.dim() != 1 or bounds.shape[0] < 1:
        raise ShapeError(name, expected="(n + 1,) for n documents", got=shape_text(bounds.shape))
    if bounds.device != x.device:
        fix = f"Move it with .to({str(x.device)!r})."
        raise DeviceError(name, expected=f"the {what}'s {x.device}", got=str(bounds.device), fix=fix)
    # A copy: what is written to the caller's tensor later must not change a backward pass.
    return bounds.to(torch.int64).clone(memory_format=torch.contiguous_format)


def _checked(name: str, bounds: Tensor, count: int) -> tuple[int, ...]:
    """The boundaries as numbers. An accelerator is waited for here: blocks can only be skipped by known numbers."""
    numbers: list[int] = with_values(name, bounds).tolist()
    if numbers[0] != 0:
        raise ArgumentError(name, expected="boundaries from 0 on", got=f"a first one of {numbers[0]}")
    for place, (before, after) in enumerate(pairwise(numbers), 1):
        if after < before:
            got = f"{before}, {after} at {place - 1} and {place}"
            fix = "Give running totals of the lengths, not the lengths."
            raise ArgumentError(name, expected="boundaries that do not decrease", got=got, fix=fix)
    if numbers[-1] != count:
        what = "T, the number of query tokens" if name == "cu_seqlens_q" else "Tk, the number of key tokens"
        expected = f"a last boundary of {count}: {what}"
        fix = "Every token belongs to a document; padding at the end is a document of its own."
        raise ArgumentError(name, expected=expected, got=str(numbers[-1]), fix=fix)
    return tuple(numbers)
