"""Statistics with a result for each query."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from .._call.spec import AttentionCall
from .._weights import row_numbers
from ..kernels._block_rows import GROUP, BlockRows
from ..kernels._blocks import grouped
from ..kernels._native import weights_strides
from ..masks._grid import take
from .statistic import Statistic

#: Keys of one query that the native kernel lists: longer lists are no longer short beside the scores.
_MOST_KEYS = 64


@final
class Entropy(Statistic):
    """Over keys: a sink is not a key. The normalized one is 0 where at most one key is visible."""

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
        return self._both(self._entropy.clamp_(min=0), self._visible)

    def native(self) -> dict[str, Any]:
        return {"entropy": self.zeros(*self.row_shape)}

    def read(self, written: dict[str, Any]) -> dict[str, Any]:
        return self._both(written["entropy"], written["visible"])

    def _both(self, entropy: Tensor, visible: Tensor) -> dict[str, Any]:
        normalized = (entropy / visible.clamp(min=2).log()).masked_fill_(visible < 2, 0)
        return {"entropy": entropy, "normalized_entropy": normalized}


@final
class Confidence(Statistic):
    """The largest weight."""

    name = "confidence"
    meaning = "max_j p_ij"

    def add(self, rows: BlockRows) -> None:
        where = (rows.block.batch, rows.block.heads, rows.place)
        largest = (rows.largest - rows.shift).exp().to(rows.total.dtype) / rows.total
        self.found[where] = torch.maximum(self.found[where], largest.squeeze(-1))

    def native(self) -> dict[str, Any]:
        return {"confidence": self.zeros(*self.row_shape)}


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


@final
class TopKeys(Statistic):
    """The k largest weights of every query and their keys, k = `top_k` or S if that is less."""

    name = "top_k"
    meaning = "the `top_k` keys with the largest p_ij, in falling order: `.indices` and `.weights`"
    shape = ("B", "H", "L", "k")
    averaged = False

    @property
    def _count(self) -> int:
        return min(self.options.top_k, self.call.grid.key_length)

    def begin(self) -> None:
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

    def result(self) -> dict[str, Any]:
        return {"top_k": TopK(self._indices, self._weights)}

    def native(self) -> dict[str, Any] | None:
        if self._count > _MOST_KEYS:
            return None
        weights = self.zeros(*self.row_shape, self._count)
        return {"top": self._count, "top_weights": weights, "top_keys": torch.zeros_like(weights, dtype=torch.int64)}

    def read(self, written: dict[str, Any]) -> dict[str, Any]:
        return {"top_k": TopK(written["top_keys"], written["top_weights"])}


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


@final
class Sink(Statistic):
    """The mass on the first keys that any query of the item sees."""

    name = "sink"
    meaning = "Σ p_ij over the first t = `sink_keys` visible keys of the item"

    def begin(self) -> None:
        super().begin()
        self._first = _marks_of_first(self.call, self.options.sink_keys).to(self.call.spec.compute_dtype)

    def add(self, rows: BlockRows) -> None:
        first = take(take(self._first, 0, rows.block.batch), 1, rows.block.heads)[:, :, rows.columns]  # (…, s, 1)
        self.put(self.found, rows, rows.terms @ first / rows.total)

    def native(self) -> dict[str, Any] | None:
        if self.options.sink_keys > _MOST_KEYS:
            return None
        marks = _marks_of_first(self.call, self.options.sink_keys).squeeze(-1)  # (1 or B, 1 or H, S)
        count = min(self.options.sink_keys, self.call.grid.key_length)
        # A stable sort of the marks puts the numbers of the marked keys first, in order, without reading any.
        there, places = marks.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
        first = places.masked_fill(there == 0, -1)[..., :count]  # (1 or B, 1 or H, t)
        first = first.expand(*self.row_shape[:2], count).int().contiguous()  # (B, H, t)
        return {"first_keys": first, "sink_keys": count, "sink": self.zeros(*self.row_shape)}


def _marks_of_first(call: AttentionCall, count: int) -> Tensor:
    """Bool (1 or B, 1 or H, S, 1): the first `count` keys that any query of the item sees."""
    seen = call.coverage.keys
    if seen is None:
        seen = torch.ones(1, 1, call.grid.key_length, 1, dtype=torch.bool, device=call.query.device)
    return seen & (seen.cumsum(2) <= count)


@final
class Distance(Statistic):
    """The mean distance of the keys, weighted by the weights."""

    name = "distance"
    meaning = "Σ_j p_ij · |i − j|, in positions"

    def add(self, rows: BlockRows) -> None:
        away = (rows.block.q - rows.block.k).abs().to(rows.terms.dtype)  # (1 or b, 1, l, s)
        self.put(self.found, rows, torch.linalg.vecdot(rows.terms, away)[..., None] / rows.total)

    def native(self) -> dict[str, Any] | None:
        return None if self.call.grid.shift is None else {"distance": self.zeros(*self.row_shape)}


@final
class HeadAverage(Statistic):
    """The one statistic as large as L × S, beside all rows."""

    name = "head_average"
    meaning = "the mean over heads of p_ij"
    shape = ("B", "L", "S")

    def begin(self) -> None:
        self.found = self.zeros(self.row_shape[0], self.row_shape[2], self.column_shape[2])

    def add(self, rows: BlockRows) -> None:
        self.found[rows.block.batch, rows.place, rows.columns] += rows.weights.sum(1) / self.row_shape[1]

    def native(self) -> dict[str, Any]:
        self.begin()
        return {"weights": self.found, "weights_strides": weights_strides(self.found)}

    def read(self, written: dict[str, Any]) -> dict[str, Any]:
        return self.result()


class _MixedValues(Statistic):
    """Σ_j p_ij v_j (B, H, L, Dv), or what is computed of it."""

    of = "values"

    def begin(self) -> None:
        self.found = self.zeros(*self.row_shape, self.call.value.shape[-1])

    def add(self, rows: BlockRows) -> None:
        mixed = grouped(rows.terms, rows.value.to(rows.terms.dtype)) / rows.total  # (b, h, l, Dv)
        self.found[rows.block.batch, rows.block.heads, rows.place] += mixed


@final
class Output(_MixedValues):
    """What `attention` gives without dropout."""

    name = "output"
    meaning = "Σ_j p_ij v_j, the output of `attention` without dropout, in the inputs' dtype"
    shape = ("B", "H", "L", "Dv")
    averaged = False

    def result(self) -> dict[str, Any]:
        return {"output": self.found.to(self.call.query.dtype)}

    def native(self) -> dict[str, Any]:
        return {}


@final
class OutputNorm(_MixedValues):
    """The length of what a head writes (Kobayashi et al., 2020)."""

    name = "output_norm"
    meaning = "‖Σ_j p_ij v_j‖"

    def result(self) -> dict[str, Any]:
        return {"output_norm": torch.linalg.vector_norm(self.found, dim=-1)}

    def native(self) -> dict[str, Any]:
        return {"norm": self.zeros(*self.row_shape)}

    def read(self, written: dict[str, Any]) -> dict[str, Any]:
        return {"output_norm": written["norm"]}


@final
class Rows(Statistic):
    """The weights themselves. Where one process holds the call, a pass over these rows alone computes them."""

    name = "rows"
    meaning = "p_i of the n queries in `queries`"
    shape = ("B", "H", "n", "S")
    averaged = False

    def begin(self) -> None:
        length = self.call.grid.query_length
        here, chosen = self.totals.rows(length, torch.device("cpu")), row_numbers(self.queries, length, "queries")
        slots = torch.full((length,), -1).index_copy_(0, here, torch.arange(len(here)))
        places = slots if chosen is None else slots[chosen.cpu()]
        self._places = places[places >= 0]  # (n,), among the rows that are here
        self.found = self.zeros(*self.row_shape[:2], len(self._places), self.column_shape[2])

    def add(self, rows: BlockRows) -> None:
        there = ((self._places >= rows.place.start) & (self._places < rows.place.stop)).nonzero()[:, 0]
        if len(there):
            target = self.found[rows.block.batch, rows.block.heads, :, rows.columns]
            target[:, :, there] = rows.weights[:, :, self._places[there] - rows.place.start]
