"""A mask as the Triton kernels read it: plain numbers and tensors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
from torch import Tensor

from ..._call.call import Call
from ...masks._bound import BoundMask
from ...masks._combined import Or
from ...masks._grid import Grid
from ...masks._lowering import evaluated
from ...masks._part import document_ids, full_mask
from ...masks._structure import Band, RowRanges, Structure, joined
from ...positions._alibi import ALiBi, slopes_of
from .._base import cut, rows_of_mask


class Terms(NamedTuple):
    """A key is visible to a query if every term allows it. An absent term allows all keys.

    Args:
        low, high, stop: key j is visible to query i if i + low ≤ j ≤ i + high and j < stop.
        shift: position of the first query minus position of the first key, for distances.
        first: first visible key of each query, integers (1 or B, 1 or L). It may lie outside the keys.
        last: one past the last one, likewise. It is passed where `first` is, in the same shape.
        keys: visible keys, bool (1 or B, S).
        visible: bool (1 or B, 1 or H, 1 or L, 1 or S).
        bias: added to the scores, floats of such a shape; −∞ hides.
        query_documents: document of each query, int64 (1 or B, L). Both documents are passed, or neither.
        key_documents: of each key, int64 (1 or B, S). A key is visible to the queries of its document.
        slopes: m of ALiBi, float32 (H,): m · |i + shift − j| is subtracted from the scores.
        first_query: no query before it sees the key, int32 (1 or B, S). It spares work and hides nothing.
        last_query: one past the last query that can see the key, likewise.
    """

    low: int
    high: int
    stop: int
    shift: int = 0
    first: Tensor | None = None
    last: Tensor | None = None
    keys: Tensor | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    slopes: Tensor | None = None
    first_query: Tensor | None = None
    last_query: Tensor | None = None


class Operands(NamedTuple):
    """What the kernels compute scores from. The scores themselves are never stored.

    Args:
        query: (B, H, L, D), any strides.
        key: (B, Hkv, S, D), any strides; Hkv divides H.
        terms: the mask.
        scale: factor of the scores.
        softcap: c of s ← c·tanh(s/c); 0 for none.
    """

    query: Tensor
    key: Tensor
    terms: Terms
    scale: float
    softcap: float = 0.0

    def of_rows(self, rows: Tensor) -> Operands:
        """The operands of these rows, numbers (n,)."""
        terms, count = self.terms, self.key.shape[2]
        chosen = rows_of_mask(terms, rows, (self.query.shape[2], count)) | cut(terms, {"query_documents": 1}, rows)
        # Chosen rows need not be neighbours, so ALiBi becomes a bias.
        if terms.slopes is not None:
            distances = (rows[:, None] + terms.shift - torch.arange(count, device=rows.device)).abs()
            chosen["bias"] = joined(chosen.get("bias"), -terms.slopes[None, :, None, None] * distances, add)
        only_of_all_rows = dict.fromkeys(("slopes", "first_query", "last_query"))
        terms = terms._replace(shift=0, **chosen, **only_of_all_rows)
        return self._replace(query=self.query.index_select(2, rows), terms=terms)

    def of_head(self, head: int) -> Operands:
        """The operands of one query head."""
        one, kv_head = slice(head, head + 1), head * self.key.shape[1] // self.query.shape[1]
        terms = self.terms._replace(**cut(self.terms, {"visible": 1, "bias": 1, "slopes": 0}, one))
        return self._replace(query=self.query[:, one], key=self.key[:, kv_head : kv_head + 1], terms=terms)


def operands_of(call: Call) -> Operands:
    """The operands of a call. Its mask is lowered without reading a value, and a prepared mask only once."""
    bound = call.bound
    terms = bound.form("triton", lambda: lower(bound))
    return Operands(call.query, call.key, terms, call.layout.scale, call.layout.softcap or 0.0)


def lower(bound: BoundMask) -> Terms:
    """The terms of a mask, with the ranges in which documents lie, so that kernels skip what lies outside."""
    terms = with_ranges(conditions_of(bound.parts, bound.grid))
    if terms.query_documents is None or terms.key_documents is None:
        return terms
    first_query, last_query = _range_of(terms.key_documents, terms.query_documents)
    return terms._replace(first_query=first_query, last_query=last_query)


def conditions_of(parts: Iterable[BoundMask], grid: Grid) -> Terms:
    """The terms of masks that must all allow a key. One without a structure is evaluated for the whole grid."""
    structure, slopes, documents = Structure(), None, None
    for part in parts:
        exact = part.structure
        if isinstance(full_mask(part.mask), Or):
            exact = longer(exact, grid) or exact
        if exact.exact:
            structure = structure.meet(exact)
        elif isinstance(part.mask, ALiBi) and grid.shift is not None and slopes is None:
            slopes = slopes_of(torch.arange(grid.num_heads, device=grid.device), grid.num_heads, torch.float32)
        elif documents is None and (ids := document_ids(part)) is not None:
            documents = ids
        else:
            structure = structure.meet(evaluated(part))
    terms = _of_structure(structure, grid)._replace(slopes=slopes)
    if documents is None:
        return terms
    of_queries, of_keys = (ids.long().contiguous() for ids in documents)
    return terms._replace(query_documents=of_queries, key_documents=of_keys)


def longer(structure: Structure, grid: Grid) -> Structure | None:
    """The exact structure of `|` where both masks show the first keys to each query, as in ``causal() | prefix(n)``."""
    runs = [run_of(each, grid) for each in structure.either]
    stops = [run[1] for run in runs if run is not None and run[0] is None]
    return Structure(rows=RowRanges(None, reduce(torch.maximum, stops))) if len(stops) == len(runs) else None


def run_of(structure: Structure, grid: Grid) -> tuple[Tensor | None, Tensor] | None:
    """The one run of keys that a structure shows to each query; ``None`` if it is no run.

    Returns:
        The first key, ``None`` for 0, and one past the last key, integers (1 or B, L) each. They may lie outside the
        keys.
    """
    band, rows = structure.band or Band.whole(grid), structure.rows
    is_marked = structure.queries is not None or structure.keys is not None or structure.tensors or structure.biases
    if is_marked or not structure.exact:
        return None
    queries = torch.arange(grid.query_length, device=grid.device)[None]
    first, last = None, (queries + (band.high + 1)).clamp(max=band.stop)
    if band.low > 1 - grid.query_length:
        first = queries + band.low
    if rows is not None:
        first, last = joined(first, rows.first, torch.maximum), torch.minimum(last, rows.stop)
    return first, last


def _of_structure(structure: Structure, grid: Grid) -> Terms:
    band = structure.band or Band.whole(grid)
    rows = structure.rows
    if structure.queries is not None:
        unmasked = RowRanges(None, structure.queries * grid.key_length)  # a fully masked row is an empty range
        rows = unmasked if rows is None else rows.meet(unmasked)
    biases = [bias.detach() for bias in structure.biases]
    if len(biases) > 1:
        biases = [bias.float() for bias in biases]  # a sum in half precision would lose digits
    first, last = None, None
    if rows is not None:
        first, last = rows.first, rows.stop
        if first is not None:
            first, last = torch.broadcast_tensors(first, last)
    return Terms(
        band.low,
        band.high,
        band.stop,
        grid.shift or 0,
        first,
        last,
        structure.keys,
        reduce(and_, structure.tensors) if structure.tensors else None,
        reduce(add, biases) if biases else None,
    )


def with_ranges(terms: Terms) -> Terms:
    """The terms with the range of keys of each document. It hides nothing that the documents do not hide."""
    if terms.query_documents is None or terms.key_documents is None:
        return terms
    first, last = _range_of(terms.query_documents, terms.key_documents)
    if terms.first is not None:
        first = torch.maximum(first, terms.first)
    if terms.last is not None:
        last = torch.minimum(last, terms.last)
    first, last = torch.broadcast_tensors(first, last)
    return terms._replace(first=first, last=last)


def _range_of(ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For each id (1 or B, n) the first, and one past the last, place of that id in `others` (1 or B, m)."""
    count = others.shape[1]
    if count == 0:
        empty = torch.zeros_like(ids, dtype=torch.int32)
        return empty, empty
    ordered, places = others.sort(dim=1, stable=True)
    left = torch.searchsorted(ordered, ids)
    right = torch.searchsorted(ordered, ids, right=True)
    first = places.gather(1, left.clamp(max=count - 1))
    last = places.gather(1, (right - 1).clamp(min=0)) + 1
    return first.int(), torch.where(right > left, last, first).int()
