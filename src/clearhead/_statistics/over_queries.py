"""Statistics over the counted queries: one result per key, or per head."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels._block_rows import BlockRows
from ..kernels._blocks import LongSum, long_product
from .statistic import Options, Statistic


@final
class Received(Statistic):
    """Σ_i p_ij is also the gradient of Σ_i o_i with respect to v_j. The mean is 0 if no counted query sees the key."""

    name = "received"
    meaning = "Σ_{i ∈ Q} p_ij"
    beside: ClassVar = {"received_mean": "received ÷ number of queries in Q that see key j"}
    shape = ("B", "H", "S")

    def begin(self) -> None:
        self._received, self._viewers = LongSum(self.zeros(*self.column_shape)), self.zeros(*self.column_shape)

    def add(self, rows: BlockRows) -> None:
        # Indexed as (B, H, 1, S), so that blocks of several heads are added without a loop.
        where = (rows.block.batch, rows.block.heads, slice(None), rows.columns)
        self._received.run.unsqueeze(2)[where] += long_product(rows.share, rows.terms)  # (b, h, 1, s)
        self._received.end_block()
        # Counted from the mask, because a visible key may have a weight that rounds to 0.
        counted = torch.ones_like(rows.total[:1, :1], dtype=torch.bool) if rows.counted is None else rows.counted
        mask = None if self.call.mask is None else self.call.mask.visible(rows.block)
        self._viewers.unsqueeze(2)[where] += (counted if mask is None else counted & mask).sum(-2, keepdim=True)

    def result(self) -> dict[str, Any]:
        received, viewers = self.totals.of_keys(torch.stack((self._received.result(), self._viewers)))
        return self.read({"received": received, "viewers": viewers})

    def kernel_form(self) -> dict[str, Any]:
        return {"received": self.column_shape, "viewers": self.column_shape}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        received = buffers["received"]
        return {"received": received, "received_mean": received / buffers["viewers"].clamp(min=1)}


class _MaxScore(Statistic):
    """The largest, with its sign, of one number per query. −∞ if no key is visible."""

    shape = ("B", "H")
    of = "scores"
    by_maximum = True
    #: The name of the number of a query, in `BlockRows` and in the native kernel.
    number: ClassVar[str]

    def begin(self) -> None:
        self.accumulator = self.zeros(*self.row_shape[:2]).fill_(float("-inf"))

    def add(self, rows: BlockRows) -> None:
        # Masked before the maximum over rows, because a padded query may have the largest score.
        largest: Tensor = getattr(rows, self.number)  # (b, h, l, 1)
        if rows.counted is not None:
            largest = largest.masked_fill(~rows.counted, float("-inf"))
        where = (rows.block.batch, rows.block.heads)
        largest = largest.amax((-2, -1)).to(self.accumulator.dtype)  # (b, h)
        self.accumulator[where] = torch.maximum(self.accumulator[where], largest)

    def result(self) -> dict[str, Any]:
        return {self.name: self.totals.maximum(self.accumulator)}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        largest = buffers[self.number]  # (B, H, L)
        if self.counted is not None:
            largest = largest.masked_fill(~self.counted[..., 0], float("-inf"))
        if largest.shape[-1] == 0:  # `amax` refuses an empty dimension
            largest = F.pad(largest, (0, 1), value=float("-inf"))
        return {self.name: largest.amax(-1)}


@final
class MaxLogit(_MaxScore):
    """The largest score, after soft-cap and bias."""

    name = "max_logit"
    meaning = "max s_ij over i ∈ Q and visible j"
    number = "largest"

    def kernel_form(self) -> dict[str, Any]:
        return {}  # `largest` is always present


@final
class RawMaxLogit(_MaxScore):
    """The largest score before soft-cap and bias.

    It is proportional to the query projection, as `qk_clip_` needs (Kimi Team, "Kimi K2: Open agentic intelligence",
    2025, section 2.1). A key under a bias of −∞ is masked and does not count.
    """

    name = "raw_max_logit"
    meaning = "max scale · q_i·k_j over i ∈ Q and visible j"
    number = "raw"

    def native_form(self) -> dict[str, Any]:
        return {"raw": self.row_shape}

    def triton_form(self) -> dict[str, Any] | None:
        mask = self.call.mask
        # Without soft-cap and bias the scores are these products.
        return None if self.call.layout.softcap is not None or (mask is not None and mask.has_bias) else {}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        return super().read({"raw": buffers.get("raw", buffers["largest"])})


@final
class WeightAtOffset(Statistic):
    """The mean over the counted queries i for which the key at position i + o is visible. 0 if there is no such query.

    o = −1 is the previous token. If a text repeats with period n, an induction head attends to o = 1 − n.
    """

    name = "offset"
    meaning = "the mean of p_ij at j = i + o, for each o of `offsets`"
    shape = ("B", "H", "number of offsets")

    @classmethod
    def labels(cls, options: Options) -> tuple[str, ...]:
        return tuple(f"offset {offset:+d}" for offset in options.offsets)

    def begin(self) -> None:
        shape = (*self.row_shape[:2], len(self.options.offsets))
        self._sums, self._counts = LongSum(self.zeros(*shape)), self.zeros(*shape)

    def add(self, rows: BlockRows) -> None:
        for place, offset in enumerate(self.options.offsets):
            scores, sees_key = self._diagonal(rows, offset)  # (b, h, l, 1 or s)
            # The mean's denominator has the counted queries only.
            if rows.counted is not None:
                sees_key = sees_key & rows.counted
            where = (rows.block.batch, rows.block.heads, place)
            weights = (scores.exp() / rows.total).masked_fill(~sees_key, 0)
            self._sums.run[where] += weights.sum((-2, -1))
            self._counts[where] += sees_key.sum((-2, -1))
        self._sums.end_block()

    def _diagonal(self, rows: BlockRows, offset: int) -> tuple[Tensor, Tensor]:
        """Shifted scores on one diagonal, and whether the key exists and is visible."""
        shift = self.call.grid.shift
        if shift is None:
            return rows.shifted, (rows.block.k == rows.block.q + offset) & (rows.shifted > float("-inf"))
        # With consecutive positions each query has one such key, and one gather reads all of them.
        column = rows.block.i + shift + offset - rows.columns.start  # (1, 1, l, 1)
        inside = (column >= 0) & (column < rows.width)
        if rows.width == 0:  # `gather` refuses an empty dimension
            return rows.total, torch.zeros_like(rows.total, dtype=torch.bool)
        index = column.clamp(0, rows.width - 1).expand(*rows.shifted.shape[:3], 1)
        scores = rows.shifted.gather(-1, index)
        return scores, inside & (scores > float("-inf"))

    def result(self) -> dict[str, Any]:
        sums, counts = self.totals.summed(torch.stack((self._sums.result(), self._counts)))
        return {"offset": sums / counts.clamp(min=1)}

    def native_form(self) -> dict[str, Any] | None:
        if self.call.grid.shift is None:
            return None
        offsets = torch.tensor(self.options.offsets, dtype=torch.int64, device=self.call.query.device)
        return {"stripes": (*self.row_shape, len(offsets)), "offsets": offsets, "offset_count": len(offsets)}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        weights = buffers["stripes"]  # (B, H, L, offsets), −1 if the query sees no such key
        sees_key = weights >= 0
        if self.counted is not None:
            sees_key &= self.counted
        # A float32 sum over a long sequence would lose digits.
        sums = (weights * sees_key).sum(2, dtype=torch.float64)
        return {"offset": (sums / sees_key.sum(2).clamp(min=1)).float()}


@final
class Map(Statistic):
    """The weights in R × R tiles. R is `map_size`, or the number of queries or keys if that is less.

    Mass pooling takes the mean over a tile's counted queries of their mass on the tile's keys, so rows sum to at most
    1. Max pooling takes the largest p_ij of the tile. Query i belongs to tile ⌊i·R/L⌋, and key j to tile ⌊j·R/S⌋.
    """

    name = "map"
    meaning = "the weights pooled to R × R tiles, R = `map_size`"
    shape = ("B", "H", "R", "R")

    @property
    def _tiles(self) -> tuple[int, int]:
        grid, size = self.call.grid, self.options.map_size
        return min(size, grid.query_length), min(size, grid.key_length)

    def begin(self) -> None:
        self._map = LongSum(self.zeros(*self.row_shape[:2], *self._tiles))

    def add(self, rows: BlockRows) -> None:
        row_tiles = rows.block.i.flatten() * self._tiles[0] // max(1, self.call.grid.query_length)  # (l,)
        pooled = self._pool_columns(rows)  # (b, h, l, R)
        pooled = pooled if rows.counted is None else pooled * rows.counted
        target = self._map.run[rows.block.batch, rows.block.heads]
        # A maximum over many blocks loses no digits, so it needs no `end_block`.
        if self.options.map_pooling == "max":
            target.scatter_reduce_(2, row_tiles[:, None].expand_as(pooled), pooled, "amax")
            return
        target += torch.zeros_like(target).index_add_(2, row_tiles, pooled)
        self._map.end_block()

    def _pool_columns(self, rows: BlockRows) -> Tensor:
        columns = self._tiles[1]
        tiles = rows.block.j.flatten() * columns // max(1, self.call.grid.key_length)  # (s,)
        if self.options.map_pooling == "mass":
            # One GEMM with the 0/1 membership matrix replaces a scatter.
            member = tiles[:, None] == torch.arange(columns, device=tiles.device)  # (s, R)
            return rows.terms @ member.to(rows.terms.dtype) / rows.total
        pooled = rows.terms.new_zeros(*rows.terms.shape[:3], columns)
        return pooled.scatter_reduce_(3, tiles.expand_as(rows.terms), rows.terms, "amax") / rows.total

    def result(self) -> dict[str, Any]:
        return self.read({"map": self._map.result()})

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        pooled: Tensor = buffers["map"]
        if self.options.map_pooling == "max":
            return {"map": self.totals.maximum(pooled)}
        # The mean over the counted queries of each row of tiles. 0 if there are none.
        sums, (rows, _), length = self.totals.summed(pooled), self._tiles, self.call.grid.query_length
        tiles = self.totals.rows(length, sums.device) * rows // max(1, length)  # (l,)
        counted = sums.new_ones(1, len(tiles)) if self.counted is None else self.counted[:, 0, :, 0].to(sums.dtype)
        counts = self.totals.summed(sums.new_zeros(counted.shape[0], rows).index_add_(1, tiles, counted))
        return {"map": sums / counts.clamp_(min=1)[:, None, :, None]}  # (B, H, R, R)

    def kernel_form(self) -> dict[str, Any]:
        rows, columns = self._tiles
        of_map = {"map": (*self.row_shape[:2], rows, columns), "map_rows": rows, "map_columns": columns}
        return {**of_map, "map_max": self.options.map_pooling == "max"}
