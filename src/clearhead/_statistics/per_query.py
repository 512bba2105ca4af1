"""Statistics with one number for each query."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call.call import zero_hidden
from ..errors import ArgumentError
from ..kernels._block_rows import BlockRows
from ..kernels._blocks import block_scores
from ..masks._combined import all_of
from ..masks._grid import take
from .statistic import MOST_LISTED_KEYS, Statistic
from .totals import PartialCall


@final
class Entropy(Statistic):
    """The entropy over keys. A sink is not a key. The normalized entropy is 0 if at most one key is visible."""

    name = "entropy"
    meaning = "−Σ_j p_ij ln p_ij, in nats"
    beside: ClassVar = {"normalized_entropy": "entropy ÷ ln(visible keys)"}

    def begin(self) -> None:
        self._entropy, self._visible = self.zeros(*self.row_shape), self.zeros(*self.row_shape)

    def add(self, rows: BlockRows) -> None:
        # −Σ p ln p = Σ p · ln total − Σ p (s − shift), with s − shift = −∞ only where p = 0.
        floor = torch.finfo(rows.shifted.dtype).min
        shifted = rows.shifted if self.call.mask is None else rows.shifted.clamp(min=floor)
        inner = torch.linalg.vecdot(rows.terms, shifted)[..., None] / rows.total
        self.put(self._entropy, rows, rows.mass * rows.total.log() - inner)
        self.put(self._visible, rows, rows.visible)

    def result(self) -> dict[str, Any]:
        entropy, visible = self._entropy.clamp_(min=0), self._visible
        # Fewer than two keys count as infinitely many, whose normalized entropy is 0.
        normalized = entropy / F.threshold(visible, 1.5, float("inf")).log()
        return {"entropy": entropy, "normalized_entropy": normalized}

    def kernel_form(self) -> dict[str, Any]:
        return {"entropy": self.row_shape, "visible": self.row_shape}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        self._entropy, self._visible = buffers["entropy"], buffers["visible"]
        return self.result()


@final
class Confidence(Statistic):
    """The largest weight."""

    name = "confidence"
    meaning = "max_j p_ij"

    def add(self, rows: BlockRows) -> None:
        where = (rows.block.batch, rows.block.heads, rows.place)
        weight = (rows.largest - rows.shift).exp().to(rows.total.dtype) / rows.total
        self.accumulator[where] = torch.maximum(self.accumulator[where], weight.squeeze(-1))

    def kernel_form(self) -> dict[str, Any]:
        return {"confidence": self.row_shape}


@final
class TopLogit(Statistic):
    """The largest score of each query, after soft-cap and bias. 0 if no key is visible, so that means stay finite."""

    name = "top_logit"
    meaning = "max_j s_ij over visible keys"
    of = "scores"

    def begin(self) -> None:
        self.accumulator = self.zeros(*self.row_shape).fill_(float("-inf"))

    def add(self, rows: BlockRows) -> None:
        where = (rows.block.batch, rows.block.heads, rows.place)
        largest = rows.largest.squeeze(-1).to(self.accumulator.dtype)
        self.accumulator[where] = torch.maximum(self.accumulator[where], largest)

    def result(self) -> dict[str, Any]:
        return self.read({"largest": self.accumulator})

    def kernel_form(self) -> dict[str, Any]:
        return {}  # `largest` is always present

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        return {"top_logit": buffers["largest"].masked_fill(buffers["largest"] == float("-inf"), 0)}


@final
class Sink(Statistic):
    """The mass on the first keys of the batch item that any query sees."""

    name = "sink"
    meaning = "Σ p_ij over the first t = `sink_keys` keys of the item that any query sees"

    def begin(self) -> None:
        super().begin()
        self._first = self._marks().to(self.call.layout.compute_dtype)

    def _marks(self) -> Tensor:
        """The first visible keys, bool (1 or B, 1 or H, S, 1)."""
        visible = self.call.coverage.keys  # (1 or B, 1 or H, S, 1)
        if visible is None:
            visible = self.call.query.new_ones(1, 1, self.call.grid.key_length, 1, dtype=torch.bool)
        return visible & (visible.cumsum(2) <= self.options.sink_keys)

    def add(self, rows: BlockRows) -> None:
        first = take(take(self._first, 0, rows.block.batch), 1, rows.block.heads)[:, :, rows.columns]  # (…, s, 1)
        self.put(self.accumulator, rows, rows.terms @ first / rows.total)

    def triton_form(self) -> dict[str, Any]:
        return {"sink": self.row_shape, "first_keys": self._marks().squeeze(-1)}  # (1 or B, 1 or H, S)

    def native_form(self) -> dict[str, Any] | None:
        if self.options.sink_keys > MOST_LISTED_KEYS:
            return None
        count = min(self.options.sink_keys, self.call.grid.key_length)
        # A stable sort moves the numbers of the marked keys to the front, in order, without reading values.
        marks = self._marks().squeeze(-1).to(torch.uint8)  # (1 or B, 1 or H, S)
        is_marked, numbers = marks.sort(dim=-1, descending=True, stable=True)
        first = numbers.masked_fill(is_marked == 0, -1)[..., :count].expand(*self.row_shape[:2], count)
        return {"sink": self.row_shape, "first_keys": first.int().contiguous(), "sink_keys": count}


@final
class LostMass(Statistic):
    """The mass that the keys of `masks.selected` leave out, which takes the scores of all keys."""

    name = "lost_mass"
    meaning = "1 − exp(lse_i − lse_i of the same call without its `masks.selected`), 0 if it has none"
    of: ClassVar = "scores"

    def begin(self) -> None:
        super().begin()
        if isinstance(self.call, PartialCall):
            expected, fix = "statistics without 'lost_mass'", "Compute it in one process, from the whole query and key."
            raise ArgumentError("statistics", expected=expected, got="a call of several processes", fix=fix)
        call = self.call
        if call.bound.selection is None:
            self._dense = None
            return
        query, key = call.whole_ or (call.query, call.key)
        mask = all_of([part.mask for part in call.bound.parts if part.structure.selection is None])
        self._dense = zero_hidden(call.changed(query, key, key, mask=mask), queries=False)

    def add(self, rows: BlockRows) -> None:
        dense, block, group = self._dense, rows.block, self.call.layout.group
        if dense is None:
            return
        kv_heads = slice(block.heads.start // group, block.heads.stop // group)
        query = dense.query[block.batch, block.heads, rows.place].to(rows.query.dtype)
        key = dense.key[block.batch, kv_heads, rows.columns].to(rows.key.dtype)
        scores, _ = block_scores(dense, block, query, key)  # (b, h, l, s)
        # Of all keys, of the listed ones, and of the sink, in units of e^shift.
        every = (scores - rows.shift).exp().sum(-1, keepdim=True)
        listed = rows.mass * rows.total
        sink = rows.total - listed if self.call.sinks is not None else torch.zeros_like(listed)
        lost = 1 - (listed + sink) / (every + sink)
        self.put(self.accumulator, rows, lost.masked_fill(every + sink == 0, 0).clamp(min=0).to(self.accumulator.dtype))


@final
class Distance(Statistic):
    """The mean distance of the keys, weighted by the weights."""

    name = "distance"
    meaning = "Σ_j p_ij · |i − j|, in positions"

    def add(self, rows: BlockRows) -> None:
        distances = (rows.block.q - rows.block.k).abs().to(rows.terms.dtype)  # (1 or b, 1, l, s)
        self.put(self.accumulator, rows, torch.linalg.vecdot(rows.terms, distances)[..., None] / rows.total)

    def kernel_form(self) -> dict[str, Any] | None:
        return None if self.call.grid.shift is None else {"distance": self.row_shape}
