"""Statistics of attention weights, each folding blocks of rows into a small result.

A row may come in several blocks, of some of its columns each, whose weights are those of the whole row.

Notation: p_ij the weights, s_ij the scores as `attention` defines them, Q the queries that are counted (all, or those
of `query_mask`). A masked weight is exactly 0. A query that sees no key has p = 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from .._call.spec import AttentionCall
from ..kernels._block_rows import GROUP, BlockRows
from ..kernels._blocks import LongSum, grouped, long_product
from ..masks._grid import take
from .totals import ONE_PROCESS, Totals


@dataclass(frozen=True)
class Options:
    """Options of statistics; see `attention_statistics`."""

    top_k: int = 8
    map_size: int = 128
    map_pooling: Literal["mass", "max"] = "mass"
    sink_keys: int = 1
    offsets: tuple[int, ...] = (-1,)


class TopK(NamedTuple):
    """The keys each query attends to most, in falling order; index −1 and weight 0 where it sees fewer.

    Args:
        indices: int64 (B, H, L, k).
        weights: (B, H, L, k).

    Example:
        >>> import torch, clearhead
        >>> x = torch.eye(2)[None, None]
        >>> found = clearhead.attention_statistics(x, x, clearhead.masks.causal(), statistics=("top_k",), top_k=2)
        >>> found.top_k.indices.tolist()  # the first query sees one key
        [[[[0, -1], [1, 0]]]]
    """

    indices: Tensor
    weights: Tensor


class Statistic(ABC):
    """One quantity, gathered block by block."""

    name: ClassVar[str]
    #: Result names whose second dimension is H, which `per="kv_head"` may average.
    per_head: ClassVar[tuple[str, ...]] = ()
    #: What results have a number of: each query (B, H, L, …), each key (B, H, S), or the head alone (B, H, …).
    of: ClassVar[Literal["queries", "keys", "heads"]] = "queries"

    def __init__(self, call: AttentionCall, options: Options, counted: Tensor | None) -> None:
        self.call = call
        self.options = options
        self.counted = counted  # (B, 1, L, 1) bool, or None
        grid = call.grid
        self.row_shape = (grid.batch_size, grid.num_heads, call.query.shape[2])  # of L queries, those that are here
        self.column_shape = (grid.batch_size, grid.num_heads, grid.key_length)
        self.begin()

    def begin(self) -> None:
        """Make the tensors that blocks are added to. Default: `found`, one number per query that is here."""
        self.found = self.zeros(*self.row_shape)

    @abstractmethod
    def add(self, rows: BlockRows) -> None:
        """Add a block."""

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        """The finished tensors by name, `found` by default; `totals` finishes what was added up over queries."""
        return {self.name: self.found}

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.call.spec.compute_dtype, device=self.call.query.device)

    def put(self, target: Tensor, rows: BlockRows, value: Tensor) -> None:
        """Add (b, h, l, 1) to a (B, H, L) tensor."""
        target[rows.block.batch, rows.block.heads, rows.place] += value.squeeze(-1)


@final
class Entropy(Statistic):
    """−Σ_j p_ij ln p_ij in nats (B, H, L), over keys: a sink is not a key.

    ``normalized_entropy`` is divided by ln of the number of visible keys; 0 where at most one is visible.
    """

    name = "entropy"
    per_head = ("entropy", "normalized_entropy")

    def begin(self) -> None:
        self._entropy, self._visible = self.zeros(*self.row_shape), self.zeros(*self.row_shape)

    def add(self, rows: BlockRows) -> None:
        # −Σ p ln p = Σ p · ln total − Σ p (s − shift), with s − shift = −∞ only where p = 0.
        floor = torch.finfo(rows.shifted.dtype).min
        shifted = rows.shifted if self.call.mask is None else rows.shifted.clamp(min=floor)
        inner = torch.linalg.vecdot(rows.terms, shifted)[..., None] / rows.total
        self.put(self._entropy, rows, rows.mass * rows.total.log() - inner)
        self.put(self._visible, rows, rows.visible)

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        return entropy_results(self._entropy.clamp_(min=0), self._visible)


def entropy_results(entropy: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """The entropy of each query, and what it is of the largest possible among so many visible keys."""
    normalized = (entropy / visible.clamp(min=2).log()).masked_fill_(visible < 2, 0)
    return {"entropy": entropy, "normalized_entropy": normalized}


@final
class Received(Statistic):
    """Σ_{i ∈ Q} p_ij (B, H, S): what each key receives.

    ``received_mean`` is divided by the number of counted queries that see the key; 0 where none does. Σ_i p_ij is
    also the gradient of Σ_i o_i in v_j.
    """

    name = "received"
    per_head = ("received", "received_mean")
    of = "keys"

    def begin(self) -> None:
        self._received, self._viewers = LongSum(self.zeros(*self.column_shape)), self.zeros(*self.column_shape)

    def add(self, rows: BlockRows) -> None:
        # As (B, H, 1, S), so that blocks of several heads are added without a loop.
        where = (rows.block.batch, rows.block.heads, slice(None), rows.columns)
        self._received.run.unsqueeze(2)[where] += long_product(rows.share, rows.terms)  # (b, h, 1, s)
        self._received.end_block()
        # Counted from the mask, because a visible key may have a weight that rounds to 0.
        mask = None if self.call.mask is None else self.call.mask.visible(rows.block)
        count = rows.place.stop - rows.place.start
        if mask is None:
            viewers = count if rows.counted is None else rows.counted.sum(-2, keepdim=True)
        else:
            mask = mask.expand(*mask.shape[:2], count, mask.shape[3])
            viewers = (mask if rows.counted is None else mask & rows.counted).sum(-2, keepdim=True)
        self._viewers.unsqueeze(2)[where] += viewers

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        received, viewers = totals.of_keys(torch.stack((self._received.result(), self._viewers)))
        return {"received": received, "received_mean": received / viewers.clamp(min=1)}


class _Largest(Statistic):
    """The largest of one number per query, over the queries that are counted (B, H)."""

    of = "heads"

    def begin(self) -> None:
        self.found = self.zeros(*self.row_shape[:2]).fill_(float("-inf"))

    @abstractmethod
    def of_rows(self, rows: BlockRows) -> Tensor:
        """The numbers of a block, (b, h, l, 1)."""

    def add(self, rows: BlockRows) -> None:
        # Before the maximum over rows: a padded query may have the largest score.
        largest = self.of_rows(rows)
        if rows.counted is not None:
            largest = largest.masked_fill(~rows.counted, float("-inf"))
        where = (rows.block.batch, rows.block.heads)
        self.found[where] = torch.maximum(self.found[where], largest.amax((-2, -1)).to(self.found.dtype))

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        return {self.name: totals.largest(self.found)}


@final
class MaxLogit(_Largest):
    """max_{i ∈ Q, j} s_ij (B, H), signed; −∞ if nothing is visible."""

    name = "max_logit"
    per_head = ("max_logit",)

    def of_rows(self, rows: BlockRows) -> Tensor:
        return rows.largest


@final
class RawMaxLogit(_Largest):
    """max scale · q_i·k_j over i ∈ Q and the keys j that query i sees (B, H), signed; −∞ if nothing is visible.

    Before soft-cap and bias: what scaling the query projection scales too, which is what `qk_clip_` needs (Kimi Team,
    "Kimi K2: Open agentic intelligence", 2025, section 2.1). A key under a bias of −∞ is masked and left out.
    """

    name = "raw_max_logit"
    per_head = ("raw_max_logit",)

    def of_rows(self, rows: BlockRows) -> Tensor:
        return rows.raw_largest


@final
class Confidence(Statistic):
    """max_j p_ij (B, H, L)."""

    name = "confidence"
    per_head = ("confidence",)

    def add(self, rows: BlockRows) -> None:
        where = (rows.block.batch, rows.block.heads, rows.place)
        largest = (rows.largest - rows.shift).exp().to(rows.total.dtype) / rows.total
        self.found[where] = torch.maximum(self.found[where], largest.squeeze(-1))


@final
class TopKeys(Statistic):
    """The k keys with the largest p_ij of every query: indices and weights (B, H, L, k)."""

    name = "top_k"

    def begin(self) -> None:
        self._count = min(self.options.top_k, self.call.grid.key_length)
        self._weights = self.zeros(*self.row_shape, self._count)
        self._shifted = torch.full_like(self._weights, float("-inf"))  # their scores, which order weights of zero too
        self._indices = torch.full(self._weights.shape, -1, device=self._weights.device)

    def add(self, rows: BlockRows) -> None:
        # A block may hold fewer columns than k, and the row more of them in other blocks.
        count = min(self._count, rows.width)
        if count == 0:
            return
        values, columns = _largest_columns(rows, count)
        where = (rows.block.batch, rows.block.heads, rows.place)
        found = {
            "_shifted": values,
            "_weights": values.exp() / rows.total,
            "_indices": (columns + rows.columns.start).masked_fill(values == float("-inf"), -1),
        }
        # With those of other columns of the same rows.
        both = {name: torch.cat((getattr(self, name)[where], new), -1) for name, new in found.items()}
        best = both["_shifted"].topk(self._count, -1).indices
        for name, tensor in both.items():
            getattr(self, name)[where] = tensor.gather(-1, best)

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        return {"top_k": TopK(self._indices, self._weights)}


@final
class Sink(Statistic):
    """Σ_{j < t} p_ij (B, H, L): the mass on the first t keys that any query of the item sees (`sink_keys`)."""

    name = "sink"
    per_head = ("sink",)

    def begin(self) -> None:
        super().begin()
        self._first = sink_marks(self.call, self.options.sink_keys).to(self.call.spec.compute_dtype)

    def add(self, rows: BlockRows) -> None:
        first = take(take(self._first, 0, rows.block.batch), 1, rows.block.heads)[:, :, rows.columns]  # (…, s, 1)
        self.put(self.found, rows, rows.terms @ first / rows.total)


def sink_marks(call: AttentionCall, count: int) -> Tensor:
    """Bool (1 or B, 1 or H, S, 1): the first `count` keys that any query of the item sees."""
    seen = call.coverage.keys
    if seen is None:
        seen = torch.ones(1, 1, call.grid.key_length, 1, dtype=torch.bool, device=call.query.device)
    return seen & (seen.cumsum(2) <= count)


@final
class Distance(Statistic):
    """Σ_j p_ij |i − j| (B, H, L), in positions."""

    name = "distance"
    per_head = ("distance",)

    def add(self, rows: BlockRows) -> None:
        away = (rows.block.q - rows.block.k).abs().to(rows.terms.dtype)  # (1 or b, 1, l, s)
        self.put(self.found, rows, torch.linalg.vecdot(rows.terms, away)[..., None] / rows.total)


@final
class Offset(Statistic):
    """Mean of p_ij over the counted queries i for which the key at position i + o is visible (B, H, offsets).

    o = −1 is the previous token; a repeated text of period n shows an induction head at o = 1 − n. 0 where no query
    sees such a key.
    """

    name = "offset"
    per_head = ("offset",)
    of = "heads"

    def begin(self) -> None:
        shape = (*self.row_shape[:2], len(self.options.offsets))
        self._sums, self._counts = LongSum(self.zeros(*shape)), self.zeros(*shape)

    def add(self, rows: BlockRows) -> None:
        for place, offset in enumerate(self.options.offsets):
            values, there = self._stripe(rows, offset)  # (b, h, l, 1 or s)
            # Queries that do not count are left out of the mean's denominator too.
            if rows.counted is not None:
                there = there & rows.counted
            where = (rows.block.batch, rows.block.heads, place)
            weights = (values.exp() / rows.total).masked_fill(~there, 0)
            self._sums.run[where] += weights.sum((-2, -1))
            self._counts[where] += there.sum((-2, -1))
        self._sums.end_block()

    def _stripe(self, rows: BlockRows, offset: int) -> tuple[Tensor, Tensor]:
        """Shifted scores on one diagonal and whether the key is there and visible."""
        shift = self.call.grid.shift
        if shift is None:
            there = (rows.block.k == rows.block.q + offset) & (rows.shifted > float("-inf"))
            return rows.shifted, there
        # Where positions count up each query has one such key, and one gather finds them all.
        column = rows.block.i + shift + offset - rows.columns.start  # (1, 1, l, 1)
        inside = (column >= 0) & (column < rows.width)
        # Nothing can be gathered from no columns; no key is there.
        if rows.width == 0:
            return rows.total, torch.zeros_like(rows.total, dtype=torch.bool)
        index = column.clamp(0, rows.width - 1).expand(*rows.shifted.shape[:3], 1)
        values = rows.shifted.gather(-1, index)
        return values, inside & (values > float("-inf"))

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        sums, counts = totals.summed(torch.stack((self._sums.result(), self._counts)))
        return {"offset": sums / counts.clamp(min=1)}


@final
class Map(Statistic):
    """The weights pooled to R × R tiles (B, H, R, R), R = `map_size` or less where there are fewer queries or keys.

    Mass-pooled: the mean over a tile's counted queries of their mass on the tile's keys, so rows sum to at most 1.
    Max-pooled: the largest p_ij of the tile. Queries i and keys j belong to tiles ⌊i·R/L⌋ and ⌊j·R/S⌋.
    """

    name = "map"
    per_head = ("map",)
    of = "heads"

    def begin(self) -> None:
        self._rows = min(self.options.map_size, self.call.grid.query_length)
        self._columns = min(self.options.map_size, self.call.grid.key_length)
        self._map = LongSum(self.zeros(*self.row_shape[:2], self._rows, self._columns))

    def add(self, rows: BlockRows) -> None:
        row_tiles = rows.block.i.flatten() * self._rows // max(1, self.call.grid.query_length)  # (l,)
        pooled = self._pool_columns(rows)  # (b, h, l, R)
        weight = rows.counted if rows.counted is not None else torch.ones_like(rows.total[:, :1], dtype=torch.bool)
        pooled = pooled * weight
        target = self._map.run[rows.block.batch, rows.block.heads]
        # The largest of several blocks is a largest; only sums lose digits over many of them.
        if self.options.map_pooling == "max":
            target.scatter_reduce_(2, row_tiles[:, None].expand_as(pooled), pooled, "amax")
            return
        target += torch.zeros_like(target).index_add_(2, row_tiles, pooled)
        self._map.end_block()

    def _pool_columns(self, rows: BlockRows) -> Tensor:
        tiles = rows.block.j.flatten() * self._columns // max(1, self.call.grid.key_length)  # (s,)
        if self.options.map_pooling == "mass":
            # A product with who belongs where: rounding is that of a GEMM, and no scatter is needed.
            member = tiles[:, None] == torch.arange(self._columns, device=tiles.device)  # (s, R)
            return rows.terms @ member.to(rows.terms.dtype) / rows.total
        pooled = rows.terms.new_zeros(*rows.terms.shape[:3], self._columns)
        return pooled.scatter_reduce_(3, tiles.expand_as(rows.terms), rows.terms, "amax") / rows.total

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        if self.options.map_pooling == "max":
            return {"map": totals.largest(self._map.result())}
        counted = None if self.counted is None else self.counted[:, 0, :, 0]
        return {"map": mean_of_tiles(totals.summed(self._map.result()), counted, self.call.grid.query_length, totals)}


def mean_of_tiles(sums: Tensor, counted: Tensor | None, length: int, totals: Totals = ONE_PROCESS) -> Tensor:
    """Sums (B, H, R, C) over the counted queries of each row of a map, divided by how many there are; 0 where none.

    Args:
        sums: of queries i in rows ⌊i·R/L⌋.
        counted: bool (B, l) of the queries that are here, or ``None`` for all.
        length: L.
        totals: adds up their number.
    """
    rows = sums.shape[2]
    tiles = totals.rows(length, sums.device) * rows // max(1, length)  # (l,)
    weight = sums.new_ones(1, len(tiles)) if counted is None else counted.to(sums.dtype)  # (1 or B, l)
    counts = totals.summed(sums.new_zeros(weight.shape[0], rows).index_add_(1, tiles, weight))  # (1 or B, R)
    return sums / counts.clamp_(min=1)[:, None, :, None]  # (B, H, R, C)


@final
class HeadAverage(Statistic):
    """mean_h p_ij (B, L, S): the one statistic as large as L × S."""

    name = "head_average"

    def begin(self) -> None:
        self.found = self.zeros(self.row_shape[0], self.row_shape[2], self.column_shape[2])

    def add(self, rows: BlockRows) -> None:
        self.found[rows.block.batch, rows.place, rows.columns] += rows.weights.sum(1) / self.row_shape[1]


class _MixedValues(Statistic):
    """Σ_j p_ij v_j (B, H, L, Dv), or what is computed of it. Needs values."""

    def begin(self) -> None:
        self.found = self.zeros(*self.row_shape, self.call.value.shape[-1])

    def add(self, rows: BlockRows) -> None:
        mixed = grouped(rows.terms, rows.value.to(rows.terms.dtype)) / rows.total  # (b, h, l, Dv)
        self.found[rows.block.batch, rows.block.heads, rows.place] += mixed


@final
class Output(_MixedValues):
    """Σ_j p_ij v_j (B, H, L, Dv), in the inputs' dtype: what `attention` gives without dropout."""

    name = "output"

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        return {"output": self.found.to(self.call.query.dtype)}


@final
class OutputNorm(_MixedValues):
    """‖Σ_j p_ij v_j‖₂ (B, H, L): the length of what a head writes (Kobayashi et al., 2020)."""

    name = "output_norm"
    per_head = ("output_norm",)

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        return {"output_norm": torch.linalg.vector_norm(self.found, dim=-1)}


def _largest_columns(rows: BlockRows, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest shifted scores of every row and their columns, (b, h, l, count).

    Groups of 64 keys are ranked by their largest score first; the largest keys lie in the `count` best groups.
    """
    groups = rows.group_maxima.shape[-1]
    if groups <= count:
        return rows.shifted.topk(count, -1)
    best = rows.group_maxima.topk(count, -1, sorted=False).indices  # (b, h, l, count)
    columns = (best[..., None] * GROUP + torch.arange(GROUP, device=best.device)).flatten(-2)  # (b, h, l, count · 64)
    # The last group may be short: places beyond it are read from the last column, and left out below.
    candidates = rows.shifted.gather(-1, columns.clamp(max=rows.width - 1))
    candidates.masked_fill_(columns >= rows.width, float("-inf"))
    values, places = candidates.topk(count, -1)
    return values, columns.gather(-1, places)


STATISTICS: dict[str, type[Statistic]] = {
    kind.name: kind
    for kind in (
        Entropy,
        Received,
        MaxLogit,
        RawMaxLogit,
        Confidence,
        TopKeys,
        Sink,
        Distance,
        Offset,
        Map,
        HeadAverage,
        Output,
        OutputNorm,
    )
}
