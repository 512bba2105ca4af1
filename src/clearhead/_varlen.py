"""`attention_varlen`: documents of different lengths laid end to end, without padding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast, final, overload

import torch
from torch import Tensor

from ._attention import attention
from ._checks import strided, with_values
from ._environment import is_tracing
from .errors import ArgumentError, DeviceError, DTypeError, ShapeError, explain_problem, shape_text
from .masks._base import Mask
from .masks._grid import Block, Grid
from .masks._positional import Causal
from .masks._structure import UNKNOWN, RowRanges, Structure
from .masks._tensors import as_mask

__all__ = ["Packing", "SameDocument", "attention_varlen", "packing"]


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several documents that lie end to end, for Σ l·s of work instead of (Σ l)·(Σ s).

    ::

        document d has queries cu_seqlens_q[d] … cu_seqlens_q[d + 1] − 1 and keys cu_seqlens_k[d] … − 1;
        query i sees key j if both are of one document and the mask allows it

    (The layout of FlashAttention's variable-length functions, Dao et al., 2022.) Rules about positions count within
    each document: ``masks.causal()`` is top-left in each, ``masks.sliding_window(…)`` ends with it. Tensors given to
    `masks.keep`, `drop` and `bias` line up with the rows and columns of the whole, T × Tk.

    Args:
        query: (T, H, D), T tokens of all documents.
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, Dv).
        cu_seqlens_q: integers (n + 1,): where each of n documents begins among the queries, and T.
        cu_seqlens_k: likewise among the keys, ending in Tk. A document may be empty.
        mask, scale, dropout_p, softcap, sinks, return_lse: as for `attention`.

    Returns:
        (T, H, Dv); with `return_lse` also (T, H). A query whose document has no key gets 0 and −∞. Documents share one
        batch item: a NaN in one of them may reach its neighbours.

    Raises:
        ArgumentError: if boundaries do not begin at 0, decrease, or do not end at T (Tk), or if there are not as many
            documents of keys as of queries.
        ShapeError, DTypeError, DeviceError: as `attention`, and for boundaries of another kind.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(7, 2, 4)  # documents of 3 and 4 tokens, 2 heads
        >>> ends = torch.tensor([0, 3, 7])
        >>> found = clearhead.attention_varlen(x, x, x, ends, ends, clearhead.masks.causal())
        >>> alone = clearhead.attention(*(x[3:].transpose(0, 1),) * 3, clearhead.masks.causal())
        >>> torch.allclose(found[3:], alone.transpose(0, 1), atol=1e-6)
        True
    """
    _require_packed(query=query, key=key, value=value)
    pack = packing(cu_seqlens_q, cu_seqlens_k, query, key)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # (H, T, D)
    found: Any = attention(
        q,
        k,
        v,
        pack.within(mask),
        scale=scale,
        dropout_p=dropout_p,
        softcap=softcap,
        sinks=sinks,
        query_positions=pack.query_positions,
        key_positions=pack.key_positions,
        return_lse=cast(Any, return_lse),
    )
    if isinstance(found, Tensor):
        return found.transpose(0, 1)  # (T, H, Dv)
    output, lse = found
    return output.transpose(0, 1), lse.transpose(0, 1)


class Packing(NamedTuple):
    """Where the documents of a packed call lie.

    Args:
        same: shows each query the keys of its document.
        query_positions, key_positions: within each document, (T,) and (Tk,).
    """

    same: SameDocument
    query_positions: Tensor
    key_positions: Tensor

    def within(self, mask: Mask | Tensor | None) -> Mask:
        """The mask, within documents.

        Raises:
            ArgumentError: for ``causal("bottom_right")``, which has no corner to join here.
        """
        if mask is None:
            return self.same
        checked = as_mask(mask)
        for part in checked.parts():
            if isinstance(part, Causal) and part.align != "top_left":
                fix = "Packed documents are causal from their first tokens: masks.causal()."
                raise ArgumentError(explain_problem("mask", expected="causal()", got=part.describe(), fix=fix))
        return self.same & checked


@final
class SameDocument(Mask):
    """Lines up with the rows and columns of a call: each query sees the keys of its own document.

    Args:
        rows: (T,) the document of every query.
        columns: (Tk,) of every key.
        starts: where each document begins among queries and among keys, and their ends; empty while tracing.
    """

    def __init__(self, rows: Tensor, columns: Tensor, starts: tuple[list[int], list[int]]) -> None:
        self._rows = rows[None, None, :, None]
        self._columns = columns[None, None, None, :]
        self._row_starts, self._column_starts = starts

    def visible(self, block: Block) -> Tensor:
        return block.cut(self._rows) == block.cut(self._columns)

    def structure(self, grid: Grid) -> Structure:
        if not self._row_starts:
            return UNKNOWN
        bounds = torch.tensor(self._column_starts, device=grid.device)
        documents = self._rows[0, 0, :, 0]
        return Structure(rows=RowRanges(bounds[documents][None], bounds[documents + 1][None]))

    def describe(self) -> str:
        return f"same_document({max(len(self._row_starts) - 1, 0)})"


def packing(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, query: Tensor, key: Tensor) -> Packing:
    """Read the boundaries of packed queries (T, …) and keys (Tk, …)."""
    bounds = (
        _boundaries("cu_seqlens_q", cu_seqlens_q, "query", query),
        _boundaries("cu_seqlens_k", cu_seqlens_k, "key", key),
    )
    if len(bounds[0]) != len(bounds[1]):
        raise ArgumentError(
            explain_problem(
                "cu_seqlens_k",
                expected=f"as many documents as cu_seqlens_q has, {len(bounds[0]) - 1}",
                got=str(len(bounds[1]) - 1),
                fix="A document without keys repeats its boundary.",
            )
        )
    starts: tuple[list[int], list[int]] = ([], [])
    if not is_tracing():
        starts = (
            _checked("cu_seqlens_q", bounds[0], query.shape[0]),
            _checked("cu_seqlens_k", bounds[1], key.shape[0]),
        )
    (rows, query_positions), (columns, key_positions) = (
        _documents(bound, x.shape[0]) for bound, x in zip(bounds, (query, key), strict=True)
    )
    return Packing(SameDocument(rows, columns, starts), query_positions, key_positions)


def _documents(bounds: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The document of every token, and its position within it."""
    tokens = torch.arange(count, device=bounds.device)
    documents = torch.searchsorted(bounds[1:].contiguous(), tokens, right=True)
    return documents, tokens - bounds[documents]


def _require_packed(**given: Tensor) -> None:
    for name, tensor in given.items():
        if strided(name, tensor).dim() != 3:
            fix = "Batches with padding go into clearhead.attention; here documents lie end to end."
            heads = "(T, H, D)" if name == "query" else "(Tk, Hkv, D)"
            raise ShapeError(explain_problem(name, expected=heads, got=shape_text(tensor.shape), fix=fix))


def _boundaries(name: str, bounds: object, what: str, x: Tensor) -> Tensor:
    expected = "an int32 or int64 tensor (n + 1,)"
    bounds = strided(name, bounds, expected)
    if bounds.dtype not in (torch.int32, torch.int64):
        raise DTypeError(explain_problem(name, expected=expected, got=str(bounds.dtype)))
    if bounds.dim() != 1 or bounds.shape[0] < 1:
        raise ShapeError(explain_problem(name, expected="(n + 1,) for n documents", got=shape_text(bounds.shape)))
    if bounds.device != x.device:
        fix = f"Move it with .to({str(x.device)!r})."
        raise DeviceError(explain_problem(name, expected=f"the {what}'s {x.device}", got=str(bounds.device), fix=fix))
    return bounds.long()


def _checked(name: str, bounds: Tensor, count: int) -> list[int]:
    """The boundaries as numbers. An accelerator is waited for here: blocks can only be skipped by known numbers."""
    numbers: list[int] = with_values(name, bounds).tolist()
    if numbers[0] != 0:
        raise ArgumentError(explain_problem(name, expected="boundaries from 0 on", got=f"a first one of {numbers[0]}"))
    for place, (before, after) in enumerate(pairwise(numbers), 1):
        if after < before:
            got = f"{before}, {after} at {place - 1} and {place}"
            fix = "Give running totals of the lengths, not the lengths."
            raise ArgumentError(explain_problem(name, expected="boundaries that do not decrease", got=got, fix=fix))
    if numbers[-1] != count:
        what = "T, the number of query tokens" if name == "cu_seqlens_q" else "Tk, the number of key tokens"
        expected = f"a last boundary of {count}: {what}"
        fix = "Every token belongs to a document; padding at the end is a document of its own."
        raise ArgumentError(explain_problem(name, expected=expected, got=str(numbers[-1]), fix=fix))
    return numbers
