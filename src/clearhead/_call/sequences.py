"""Packed sequences: sequences end to end, the representation of packed, unpadded and jagged batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from .._checks import same_device, strided, with_values
from .._environment import is_tracing, reads_values
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text
from ..masks._base import Mask
from ..masks._grid import Block, Grid
from ..masks._positional import Causal
from ..masks._prepared import PreparedMask
from ..masks._structure import RowRanges, Structure
from ..masks._tree import Tree


@dataclass(frozen=True)
class PackedSequences:
    """The boundaries of sequences among T query tokens and Tk key tokens.

    Args:
        cu_seqlens_q, cu_seqlens_k: int64 (n + 1,), from 0 to T and to Tk.
        queries, keys: the same as numbers. Empty while tracing, and on an accelerator, because reading waits for it.
        tokens: T and Tk.
        longest: no sequence has more queries and keys. Default: T and Tk.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    tokens: tuple[int, int]
    longest: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def query_positions(self) -> Tensor:
        """(T,) positions within each sequence."""
        return _positions(self.cu_seqlens_q, self.tokens[0])

    @property
    def key_positions(self) -> Tensor:
        """(Tk,) likewise."""
        return _positions(self.cu_seqlens_k, self.tokens[1])

    @cached_property
    def int32(self) -> tuple[Tensor, Tensor]:
        """The boundaries as PyTorch's kernels read them, converted once for all layers."""
        with torch.inference_mode(False):  # a prepared mask keeps them for later calls
            of_queries = self.cu_seqlens_q.int()
            return of_queries, of_queries if self.cu_seqlens_k is self.cu_seqlens_q else self.cu_seqlens_k.int()

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each sequence."""
        for (start, stop), (first, last) in zip(pairwise(self.queries), pairwise(self.keys), strict=True):
            yield slice(start, stop), slice(first, last)


def _numbers(bounds: Tensor, tokens: int) -> Tensor:
    """(tokens,) the number of every token's sequence."""
    return torch.searchsorted(bounds, torch.arange(tokens, device=bounds.device), right=True) - 1


def _positions(bounds: Tensor, tokens: int) -> Tensor:
    return torch.arange(tokens, device=bounds.device) - bounds[_numbers(bounds, tokens)]


def read_sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    query: Tensor,
    key: Tensor,
    longest: tuple[int | None, int | None] = (None, None),
) -> PackedSequences:
    """Check the boundaries of packed queries (T, …) and keys (Tk, …)."""
    same = cu_seqlens_k is cu_seqlens_q and query.shape[0] == key.shape[0]
    of_queries = _boundaries("cu_seqlens_q", cu_seqlens_q, "query", query)
    bounds = of_queries, of_queries if same else _boundaries("cu_seqlens_k", cu_seqlens_k, "key", key)
    if len(bounds[0]) != len(bounds[1]):
        expected, got = f"as many sequences as cu_seqlens_q has, {len(bounds[0]) - 1}", str(len(bounds[1]) - 1)
        fix = "A sequence without keys repeats its boundary."
        raise ArgumentError("cu_seqlens_k", expected=expected, got=got, fix=fix)
    tokens, tracing = (query.shape[0], key.shape[0]), is_tracing()
    # A graph must hold for other boundaries, and an accelerator would be waited for.
    holds_numbers = not tracing and (bounds[0].is_meta or (bounds[0].is_cpu and reads_values(bounds[0])))
    queries = keys = ()
    if holds_numbers or reads_values(bounds[0]):
        queries = keys = _checked("cu_seqlens_q", bounds[0], tokens[0], longest[0])
        if not same or longest[0] != longest[1]:
            keys = _checked("cu_seqlens_k", bounds[1], tokens[1], longest[1])
    if holds_numbers:
        return PackedSequences(*bounds, queries, keys, tokens)
    if not tracing:  # unread, they must at least lie within the tensors
        limited = [each.clamp(0, count).cummax(0).values for each, count in zip(bounds, tokens, strict=True)]
        bounds = limited[0], limited[0] if same else limited[1]
    most = [count if given is None else min(given, count) for given, count in zip(longest, tokens, strict=True)]
    return PackedSequences(*bounds, (), (), tokens, (most[0], most[1]))


def require_within(mask: Mask) -> None:
    """Raise for masks that packed sequences cannot have: ``causal("bottom_right")``, trees and prepared masks."""
    if isinstance(mask, PreparedMask):
        fix = "Pass the mask itself: within packed sequences it counts from the first token of each."
        raise ArgumentError("mask", expected="a mask that is not prepared", got="prepare(...)", fix=fix)
    for part in mask.parts():
        if isinstance(part, Tree):
            expected, fix = "a mask of each sequence", "Pass padded sequences, and parents (B, N)."
            raise ArgumentError("mask", expected=expected, got=part.describe(), fix=fix)
        if isinstance(part, Causal) and part.align != "top_left":
            fix = "Packed sequences are causal from their first tokens: masks.causal()."
            raise ArgumentError("mask", expected="causal()", got=part.describe(), fix=fix)


def within_sequences(sequences: PackedSequences, mask: Mask | None) -> Mask:
    """A mask of the T × Tk scores: `mask` within sequences."""
    same = SameSequence(sequences)
    return same if mask is None else same & mask


@final
class SameSequence(Mask):
    """Each query attends to the keys of its own sequence."""

    def __init__(self, sequences: PackedSequences) -> None:
        self.sequences = sequences
        self._of_query = _numbers(sequences.cu_seqlens_q, sequences.tokens[0])
        self._of_key = _numbers(sequences.cu_seqlens_k, sequences.tokens[1])

    def visible(self, block: Block) -> Tensor:
        return block.cut(self._of_query[None, None, :, None]) == block.cut(self._of_key[None, None, None, :])

    def structure(self, grid: Grid) -> Structure:
        # A graph and an accelerator do not know the boundaries.
        if not self.sequences.queries:
            documents = None if grid.device.type == "cpu" else (self._of_query[None], self._of_key[None])
            return Structure(exact=False, documents=documents)
        bounds, numbers = self.sequences.cu_seqlens_k, self._of_query
        return Structure(rows=RowRanges(bounds[numbers][None], bounds[numbers + 1][None]))

    def describe(self) -> str:
        return f"same_sequence({self.sequences.count})"


def _boundaries(name: str, bounds: object, what: str, x: Tensor) -> Tensor:
    expected = "an int32 or int64 tensor (n + 1,)"
    bounds = strided(name, bounds, expected)
    if bounds.dtype not in (torch.int32, torch.int64):
        raise DTypeError(name, expected=expected, got=str(bounds.dtype))
    if bounds.dim() != 1 or bounds.shape[0] < 1:
        raise ShapeError(name, expected="(n + 1,) for n sequences", got=shape_text(bounds.shape))
    same_device(name, bounds, x.device, f"the {what}'s")
    # A copy: what is written to the caller's tensor later must not change a backward pass.
    return bounds.to(torch.int64).clone(memory_format=torch.contiguous_format)


def _checked(name: str, bounds: Tensor, count: int, longest: int | None) -> tuple[int, ...]:
    """The boundaries as numbers."""
    numbers: list[int] = with_values(name, bounds).tolist()
    if numbers[0] != 0:
        raise ArgumentError(name, expected="boundaries from 0 on", got=f"a first one of {numbers[0]}")
    for place, (before, after) in enumerate(pairwise(numbers), 1):
        if after < before:
            got = f"{before}, {after} at {place - 1} and {place}"
            fix = "Give running totals of the lengths, not the lengths."
            raise ArgumentError(name, expected="boundaries that do not decrease", got=got, fix=fix)
        if longest is not None and after - before > longest:
            argument, got = name.replace("cu_seqlens", "max_seqlen"), f"{longest}, and a sequence of {after - before}"
            fix = "Leave it out, or give the length of the longest sequence."
            raise ArgumentError(argument, expected=f"no sequence of {name} longer than it", got=got, fix=fix)
    if numbers[-1] != count:
        what = "T, the number of query tokens" if name == "cu_seqlens_q" else "Tk, the number of key tokens"
        expected = f"a last boundary of {count}: {what}"
        fix = "Every token belongs to a sequence; padding at the end is a sequence of its own."
        raise ArgumentError(name, expected=expected, got=str(numbers[-1]), fix=fix)
    return tuple(numbers)
