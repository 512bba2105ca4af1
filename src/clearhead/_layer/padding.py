"""Less work for padded batches: tokens that take no part are neither projected nor attended to.

A key that no query of its item sees, and a query that sees no key, change nothing in any output, so leaving them out
is exact. It is done where the numbers that are not multiplied outweigh the calls that it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .._attention import attention
from .._call.observers import watched
from .._environment import is_tracing, is_transformed
from ..masks._base import Mask, all_of
from ..masks._grid import Grid
from ..masks._positional import Causal, SlidingWindow
from .plain import is_plain

__all__ = ["Costs", "Padding", "find_padding"]

Triple = tuple[Tensor, Tensor, Tensor]

#: Multiplications saved per batch item that pay for a call of attention of its own: either takes about 0.1 ms.
_WORTH_A_CALL = 1 << 23


@dataclass(frozen=True)
class Costs:
    """Multiplications that a query, a key, and a query with a key take in a module."""

    query: int
    key: int
    pair: int

    def of(self, queries: int, keys: int, pairs: int) -> int:
        return queries * self.query + keys * self.key + pairs * self.pair

    def are_low(self, length: int, keys: int) -> bool:
        """Whether an item of so many queries and keys is too small for anything to be gained."""
        return self.of(length, keys, length * keys) < _WORTH_A_CALL


@dataclass(frozen=True)
class Side:
    """The tokens of all items that take part, (B, length) laid end to end.

    Args:
        length: of each item with its padding.
        rows: (T,) which of the B · length tokens; ``None`` for all.
        counts: how many of each item.
        starts: where each item's first one stands.
        in_runs: whether each item's stand side by side.
    """

    length: int
    rows: Tensor | None
    counts: list[int]
    starts: list[int]
    in_runs: bool

    def take(self, x: Tensor, batch_first: bool) -> Tensor:
        """(B, length, E), or (length, B, E) → (T, E)."""
        rows = self.rows
        if rows is None:
            return (x if batch_first else x.transpose(0, 1)).flatten(0, 1)
        if not batch_first:
            length, batch = x.shape[:2]
            rows = rows % length * batch + rows // length
        return x.flatten(0, 1).index_select(0, rows)


@dataclass(frozen=True)
class Padding:
    """What of a batch takes part in an attention call.

    Args:
        queries, keys: the tokens that do.
        rest: what else hides keys; a rule about positions.
        shape: B and L.
    """

    queries: Side
    keys: Side
    rest: Mask | None
    shape: tuple[int, int]

    def take(self, query: Tensor, key: Tensor, value: Tensor, batch_first: bool = True) -> Triple:
        """Inputs (B, length, E) or (length, B, E) without their padding, (T, E); one tensor stays one where it can."""
        k = self.keys.take(key, batch_first)
        v = k if value is key else self.keys.take(value, batch_first)
        alike = query is key and (self.queries is self.keys or self.queries.rows is self.keys.rows is None)
        return k if alike else self.queries.take(query, batch_first), k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, head_dim: int, scale: float | None, dropout_p: float) -> Tensor:
        """Attention of projected tokens (T, H·D) within their items → (T, H·D)."""
        queries, keys = self.queries, self.keys
        split = (q.split(queries.counts), k.split(keys.counts), v.split(keys.counts))
        mixed: list[Tensor] = []
        for q_item, k_item, v_item, first_query, first_key in zip(*split, queries.starts, keys.starts, strict=True):
            if len(q_item) == 0 or len(k_item) == 0:
                mixed.append(q_item.new_zeros(q_item.shape))
                continue
            q_heads, k_heads, v_heads = (
                x.unflatten(1, (-1, head_dim)).transpose(0, 1)[None] for x in (q_item, k_item, v_item)
            )  # (1, H, l, D), (1, Hkv, s, D)
            output = attention(
                q_heads,
                k_heads,
                v_heads,
                self.rest,
                scale=scale,
                dropout_p=dropout_p,
                query_positions=None if self.rest is None else first_query,
                key_positions=None if self.rest is None else first_key,
            )  # (1, H, l, D)
            mixed.append(output[0].transpose(0, 1).flatten(1))  # (l, H·D)
        return torch.cat(mixed)

    def finish(self, mixed: Tensor, out_proj: nn.Module, project: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """(T, H·D) → (B, L, E), ``out_proj(0)`` for the queries that were left out."""
        batch, length = self.shape
        rows = self.queries.rows
        if rows is None:
            return project(out_proj, mixed.view(batch, length, -1))
        if is_plain(out_proj):  # of nothing it makes its bias
            short, bias = project(out_proj, mixed), cast("Tensor | None", out_proj.bias)
            filled = short.new_zeros(()) if bias is None else bias.to(short.dtype)
            whole = filled.expand(batch * length, short.shape[1]).index_copy(0, rows, short)
            return whole.view(batch, length, -1)
        whole = mixed.new_zeros(batch * length, mixed.shape[1]).index_copy(0, rows, mixed)
        return project(out_proj, whole.view(batch, length, -1))


def find_padding(mask: Mask | None, query: Tensor, key: Tensor, num_heads: int, costs: Costs) -> Padding | None:
    """Find what a mask leaves out of whole batch items, if leaving it out is faster.

    Args:
        mask: of the call.
        query, key: (B, L, …) and (B, S, …).
        num_heads: H, for the mask.
        costs: of what could be left out.

    Returns:
        ``None`` where everything takes part, where it would not be faster, where values must not be looked at, and
        where the mask says more than can be said of each item by itself.
    """
    if mask is None or not query.is_cpu or not key.is_cpu or watched() or is_tracing() or is_transformed():
        return None
    grid = Grid(query.shape[0], num_heads, query.shape[1], key.shape[1], query.device)
    batch, length, keys_length = grid.batch_size, grid.query_length, grid.key_length
    if 0 in (batch, length, keys_length) or costs.are_low(length, keys_length):
        return None
    mask.validate(grid)
    seeing, seen, rest = _sides(mask, grid)
    if (seeing is None and seen is None) or not _are_local(rest):
        return None
    keys, queries = _side(seen, batch, keys_length), _side(seeing, batch, length)
    if rest and not (keys.in_runs and queries.in_runs):
        return None
    scores = sum(query * key for query, key in zip(queries.counts, keys.counts, strict=True))
    kept = costs.of(sum(queries.counts), sum(keys.counts), scores)
    if batch * costs.of(length, keys_length, length * keys_length) - kept < batch * _WORTH_A_CALL:
        return None
    return Padding(_unless_equal(queries, keys), keys, all_of([*rest]), (batch, length))


def _sides(mask: Mask, grid: Grid) -> tuple[Tensor | None, Tensor | None, list[Mask]]:
    """Which queries see and which keys are seen, (1 or B, length) each, as far as its parts say it; the other parts."""
    seeing: Tensor | None = None
    seen: Tensor | None = None
    rest: list[Mask] = []
    for part in mask.parts():
        marks = part.structure(grid).marks(grid)
        if marks is None:
            rest.append(part)
            continue
        queries, keys = marks
        if queries is not None:
            seeing = queries if seeing is None else seeing & queries
        if keys is not None:
            seen = keys if seen is None else seen & keys
    return seeing, seen, rest


def _are_local(rest: list[Mask]) -> bool:
    """Whether these rules mean the same for a run of queries and keys that are told where they stand."""
    return all(
        isinstance(part, SlidingWindow) or (isinstance(part, Causal) and part.align == "top_left") for part in rest
    )


def _side(part: Tensor | None, batch: int, length: int) -> Side:
    if part is None:
        return Side(length, None, [length] * batch, [0] * batch, True)
    part = part.expand(batch, length)
    counts = part.sum(1)
    starts = part.int().argmax(1)
    stops = length - part.flip(1).int().argmax(1)
    in_runs = bool(((stops - starts == counts) | (counts == 0)).all())
    total = counts.tolist()
    rows = None if sum(total) == batch * length else part.flatten().nonzero()[:, 0]
    return Side(length, rows, total, starts.tolist(), in_runs)


def _unless_equal(queries: Side, keys: Side) -> Side:
    """The keys' side where the queries' holds the same tokens, so that both are taken once."""
    if queries.rows is None or keys.rows is None or queries.length != keys.length:
        return queries
    return keys if torch.equal(queries.rows, keys.rows) else queries
