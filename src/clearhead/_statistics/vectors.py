"""Statistics with a vector per query: its top keys, weights, masses or output; and the norm of the output."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from .._weights import row_numbers
from ..kernels._block_rows import GROUP_KEYS, BlockRows
from ..kernels._blocks import grouped
from .masses import Masses
from .statistic import MOST_LISTED_KEYS, Statistic


class TopK(NamedTuple):
    """The top keys of each query, in descending order. Without enough visible keys, index −1 and weight 0 follow.

    Args:
        indices: int64 (B, H, L, k).
        weights: (B, H, L, k).

    Example:
        >>> import torch, clearhead
        >>> x = torch.eye(2)[None, None]
        >>> stats = clearhead.attention_statistics(x, x, clearhead.masks.causal(), statistics=("top_k",), top_k=2)
        >>> stats.top_k.indices.tolist()  # the first query sees one key
        [[[[0, -1], [1, 0]]]]
    """

    indices: Tensor
    weights: Tensor


@final
class TopKeys(Statistic):
    """The k largest weights of each query and their keys, k = min(`top_k`, S)."""

    name = "top_k"
    meaning = "the `top_k` keys with the largest p_ij, in falling order: `.indices` and `.weights`"
    shape = ("B", "H", "L", "k")
    averaged = False

    @property
    def _count(self) -> int:
        return min(self.options.top_k, self.call.grid.key_length)

    def begin(self) -> None:
        self._weights = self.zeros(*self.row_shape, self._count)
        self._shifted = torch.full_like(self._weights, float("-inf"))  # scores rank even weights that round to 0
        self._indices = torch.full(self._weights.shape, -1, device=self._weights.device)

    def add(self, rows: BlockRows) -> None:
        # One block may hold fewer columns than k, and other blocks the others.
        count = min(self._count, rows.width)
        if count == 0:
            return
        scores, columns = _largest_columns(rows, count)
        where = (rows.block.batch, rows.block.heads, rows.place)
        keys = (columns + rows.columns.start).masked_fill(scores == float("-inf"), -1)
        new = scores, scores.exp() / rows.total, keys
        # Merged with the top keys of other blocks of these rows.
        targets = (self._shifted, self._weights, self._indices)
        candidates = [torch.cat((target[where], tensor), -1) for target, tensor in zip(targets, new, strict=True)]
        best = candidates[0].topk(self._count, -1).indices
        for target, tensor in zip(targets, candidates, strict=True):
            target[where] = tensor.gather(-1, best)

    def result(self) -> dict[str, Any]:
        return {"top_k": TopK(self._indices, self._weights)}

    def kernel_form(self) -> dict[str, Any] | None:
        if self._count > MOST_LISTED_KEYS:
            return None
        shape = (*self.row_shape, self._count)
        return {"top": self._count, "top_weights": shape, "top_keys": shape}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        return {"top_k": TopK(buffers["top_keys"], buffers["top_weights"])}


@final
class Extremes(Statistic):
    """The largest and the smallest score of each query, and their keys."""

    name = "extremes"
    meaning = "max_j s_ij and min_j s_ij over visible keys; −∞ and ∞ for a fully masked query"
    beside: ClassVar = {"extreme_keys": "the keys j of both, −1 for a fully masked query"}
    shape = ("B", "H", "L", "2")
    of = "scores"
    averaged = False

    def begin(self) -> None:
        self._scores = self.zeros(*self.row_shape, 2)
        self._scores[..., 0], self._scores[..., 1] = float("-inf"), float("inf")
        self._keys = torch.full_like(self._scores, -1, dtype=torch.int64)

    def add(self, rows: BlockRows) -> None:
        if rows.width == 0:
            return
        where = rows.block.batch, rows.block.heads, rows.place
        shifted = rows.shifted
        smallest = shifted.masked_fill(shifted == float("-inf"), float("inf"))
        for end, (score, column) in enumerate((shifted.max(-1), smallest.min(-1))):
            score = (score.to(rows.shift.dtype) + rows.shift.squeeze(-1)).to(self._scores.dtype)
            kept, keys, column = self._scores[where][..., end], self._keys[where][..., end], column + rows.columns.start
            # Another block may hold other columns of these rows. Of equal scores the first key is named.
            found = (score > kept if end == 0 else score < kept) | ((score == kept) & (column < keys))
            self._scores[where][..., end] = torch.where(found, score, kept)
            self._keys[where][..., end] = torch.where(found, column, keys)

    def result(self) -> dict[str, Any]:
        return {"extremes": self._scores, "extreme_keys": self._keys}


def _largest_columns(rows: BlockRows, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest shifted scores of each row and their columns, (b, h, l, count).

    Groups of 64 keys are ranked by their largest score. The top keys lie in the `count` best groups.
    """
    groups = rows.group_maxima.shape[-1]
    if groups <= count:
        return rows.shifted.topk(count, -1)
    best = rows.group_maxima.topk(count, -1, sorted=False).indices  # (b, h, l, count)
    in_group = torch.arange(GROUP_KEYS, device=best.device)
    columns = (best[..., None] * GROUP_KEYS + in_group).flatten(-2)  # (b, h, l, count · 64)
    # The last group may be short. Columns beyond it are clamped here, and excluded below.
    candidates = rows.shifted.gather(-1, columns.clamp(max=rows.width - 1))
    candidates.masked_fill_(columns >= rows.width, float("-inf"))
    scores, places = candidates.topk(count, -1)
    return scores, columns.gather(-1, places)


@final
class HeadAverage(Statistic):
    """The mean over heads. Only this statistic and ``rows`` can have the size L × S."""

    name = "head_average"
    meaning = "the mean over heads of p_ij"
    shape = ("B", "L", "S")

    def begin(self) -> None:
        self.accumulator = self.zeros(self.row_shape[0], self.row_shape[2], self.column_shape[2])

    def add(self, rows: BlockRows) -> None:
        self.accumulator[rows.block.batch, rows.place, rows.columns] += rows.weights.sum(1) / self.row_shape[1]

    def kernel_form(self) -> dict[str, Any]:
        return {"weights": (self.row_shape[0], self.row_shape[2], self.column_shape[2])}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        return {"head_average": buffers["weights"]}


class _MixedValues(Statistic):
    """Σ_j p_ij v_j (B, H, L, Dv), or a function of it."""

    of = "values"

    def begin(self) -> None:
        self.accumulator = self.zeros(*self.row_shape, self.call.value.shape[-1])

    def add(self, rows: BlockRows) -> None:
        mixed = grouped(rows.terms, rows.value.to(rows.terms.dtype)) / rows.total  # (b, h, l, Dv)
        self.accumulator[rows.block.batch, rows.block.heads, rows.place] += mixed


@final
class Output(_MixedValues):
    """The output of `attention` without dropout."""

    name = "output"
    meaning = "Σ_j p_ij v_j, the output of `attention` without dropout, in the inputs' dtype"
    shape = ("B", "H", "L", "Dv")
    averaged = False

    def result(self) -> dict[str, Any]:
        return {"output": self.accumulator.to(self.call.query.dtype)}

    def native_form(self) -> dict[str, Any]:
        return {"output": True}


@final
class OutputNorm(_MixedValues):
    """The norm of a head's output (Kobayashi et al., 2020)."""

    name = "output_norm"
    meaning = "‖Σ_j p_ij v_j‖"

    def result(self) -> dict[str, Any]:
        return {"output_norm": torch.linalg.vector_norm(self.accumulator, dim=-1)}

    def native_form(self) -> dict[str, Any]:
        return {"norm": self.row_shape, "output": True}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        return {"output_norm": buffers["norm"]}


@final
class MassOf(Statistic):
    """The mass on some keys: one number per query for each of `masses`."""

    name = "mass"
    meaning = "Σ p_ij over the keys of each of `masses`"
    shape = ("B", "H", "L", "number of masses")
    argument = "masses"

    @property
    def _masses(self) -> Masses:
        return self.options.masses

    def begin(self) -> None:
        self.accumulator = self.zeros(*self.row_shape, len(self._masses.each))

    def add(self, rows: BlockRows) -> None:
        for place, inside in enumerate(self._masses.inside(rows.block)):
            mass = torch.linalg.vecdot(rows.terms, inside.to(rows.terms.dtype))[..., None] / rows.total
            self.put(self.accumulator[..., place], rows, mass)

    def native_form(self) -> dict[str, Any] | None:
        shift, count = self.call.grid.shift, len(self._masses.each)
        if shift is None:
            return None
        queries, keys = self._masses.labels(self.call.grid)
        ends = [(mass.ends[0] + shift, mass.ends[1] + shift, mass.key_labels is not None) for mass in self._masses.each]
        ranges = torch.tensor(ends, dtype=torch.int64, device=queries.device).view(count, 3)
        labels = {"query_labels": queries, "key_labels": keys}
        return {"mass": (count, *self.row_shape), "mass_ranges": ranges, **labels, "mass_count": count}

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        mass: Tensor = buffers["mass"]  # (M, B, H, L)
        return {"mass": mass.movedim(0, -1)}


@final
class Rows(Statistic):
    """The weights of chosen queries. If one process holds the call, `exact_weights` computes them instead."""

    name = "rows"
    meaning = "p_i of the n queries in `queries`"
    shape = ("B", "H", "n", "S")
    averaged = False

    def begin(self) -> None:
        length = self.call.grid.query_length
        local, chosen = self.totals.rows(length, torch.device("cpu")), row_numbers(self.queries, length, "queries")
        places = torch.full((length,), -1).index_copy_(0, local, torch.arange(len(local)))
        places = places if chosen is None else places[chosen.cpu()]
        self._places = places[places >= 0]  # (n,), places among the rows of this process
        self.accumulator = self.zeros(*self.row_shape[:2], len(self._places), self.column_shape[2])

    def add(self, rows: BlockRows) -> None:
        in_block = ((self._places >= rows.place.start) & (self._places < rows.place.stop)).nonzero()[:, 0]
        if len(in_block):
            target = self.accumulator[rows.block.batch, rows.block.heads, :, rows.columns]
            target[:, :, in_block] = rows.weights[:, :, self._places[in_block] - rows.place.start]
