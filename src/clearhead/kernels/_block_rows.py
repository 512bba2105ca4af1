"""A block of rows for statistics. Scores are computed first, everything else on demand and at most once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._call.call import Call
from ..masks._grid import Block
from ._blocks import block_scores, block_sinks, grouped

GROUP_KEYS = 64  # neighbouring keys whose largest score is stored, to find the top-k quickly


@dataclass(eq=False)
class BlockRows:
    """Rows of some heads of the score matrix, with all visible columns or, if `lse` is given, with some columns.

    Scores have the dtype of query and key (see `exact_dtype`). Less the row maximum, they fit the compute dtype.

    Args:
        call: the call that the block belongs to.
        block: rows, columns, heads and batch items.
        place: slice of the rows among 0 … L.
        query: (b, h, l, D).
        key: (b, hkv, s, D), in the same dtype.
        counted: bool (b, 1, l, 1), the queries that column statistics count, by default all.
        own_value: (b, hkv, s, Dv), by default the values of the call.
        lse: (b, h, l, 1), the log-sum-exp over all columns, if the block has some of them.
    """

    call: Call
    block: Block
    place: slice
    query: Tensor
    key: Tensor
    counted: Tensor | None = None
    own_value: Tensor | None = None
    lse: Tensor | None = None

    def __post_init__(self) -> None:
        self._scores = block_scores(self.call, self.block, self.query, self.key)[0]  # (b, h, l, s), −∞ where hidden
        self.group_maxima = _group_maxima(self._scores)  # (b, h, l, ⌈s / 64⌉)

    @property
    def columns(self) -> slice:
        columns = self.block.columns
        return columns if isinstance(columns, slice) else slice(0, self.call.grid.key_length)

    @property
    def width(self) -> int:
        """The number of columns, s."""
        return self._scores.shape[-1]

    @property
    def value(self) -> Tensor:
        """The values of the columns, (b, hkv, s, Dv)."""
        if self.own_value is not None:
            return self.own_value
        heads, group = self.block.heads, self.call.layout.group
        return self.call.value[self.block.batch, heads.start // group : heads.stop // group, self.columns]

    @cached_property
    def largest(self) -> Tensor:
        """Largest score of each row, −∞ for a fully masked row, (b, h, l, 1)."""
        # Without columns, if all rows are fully masked, `amax` raises an error.
        if self.width == 0:
            return self._scores.new_full((*self._scores.shape[:-1], 1), float("-inf"))
        return self.group_maxima.amax(-1, keepdim=True)

    @cached_property
    def raw(self) -> Tensor:
        """Largest scale · q·k of the visible keys before soft-cap and bias, −∞ without any, (b, h, l, 1)."""
        mask = self.call.mask
        # Without soft-cap and bias the scores are these products.
        if self.width == 0 or (self.call.layout.softcap is None and (mask is None or not mask.has_bias)):
            return self.largest
        products = grouped(self.query, self.key.transpose(-2, -1), self.call.layout.scale)  # (b, h, l, s)
        return products.masked_fill_(self._scores == float("-inf"), float("-inf")).amax(-1, keepdim=True)

    @cached_property
    def shift(self) -> Tensor:
        """The finite number that is subtracted before exp: row maximum, sink or log-sum-exp, (b, h, l, 1)."""
        if self.lse is not None:
            return self.lse.to(self._scores.dtype).masked_fill(self.lse == float("-inf"), 0)
        # A sink may be above every score, and its term would overflow.
        shift = self.largest if self._sinks is None else torch.maximum(self.largest, self._sinks)
        return shift.masked_fill(shift == float("-inf"), 0)

    @cached_property
    def shifted(self) -> Tensor:
        """Scores less their shift, in the compute dtype, (b, h, l, s)."""
        # In place, because this is the largest tensor. Later code reads of the scores only which are −∞.
        return self._scores.sub_(self.shift).to(self.call.layout.compute_dtype)

    @cached_property
    def terms(self) -> Tensor:
        """exp(s − shift), (b, h, l, s)."""
        return self.shifted.exp()

    @cached_property
    def total(self) -> Tensor:
        """Σ_j exp(s − shift) over all columns, with the sink's term; 1 for a fully masked row; (b, h, l, 1)."""
        # The log-sum-exp covers all columns, so these terms are weights already.
        if self.lse is not None:
            return torch.ones_like(self._term_sum)
        total = self._term_sum
        if self._sinks is not None:
            total = total + (self._sinks - self.shift).exp().to(total.dtype)
        return total.masked_fill(total == 0, 1)

    @cached_property
    def _term_sum(self) -> Tensor:
        return self.terms.sum(-1, keepdim=True)

    @property
    def mass(self) -> Tensor:
        """Σ_j p over the columns, (b, h, l, 1)."""
        return self._term_sum / self.total

    @cached_property
    def weights(self) -> Tensor:
        """p, (b, h, l, s)."""
        return self.terms / self.total

    @cached_property
    def visible(self) -> Tensor:
        """The number of visible columns of each query, (b or 1, h or 1, l, 1), int64."""
        mask = None if self.call.mask is None else self.call.mask.visible(self.block)
        if mask is None:
            return torch.full((1, 1, 1, 1), self.width, device=self._scores.device)
        return mask.expand(*mask.shape[:-1], self.width).sum(-1, keepdim=True)

    @cached_property
    def share(self) -> Tensor:
        """The factor of each row in column sums, 1/total, or 0 if not counted, (b, h, 1, l)."""
        share = self.total.reciprocal()
        if self.counted is not None:
            share = share * self.counted
        return share.transpose(-2, -1)

    @property
    def _sinks(self) -> Tensor | None:
        return block_sinks(self.call, self.block, self._scores.dtype)


def _group_maxima(scores: Tensor) -> Tensor:
    keys = scores.shape[-1]  # a tensor while torch.jit traces, which has no divmod
    count, remainder = keys // GROUP_KEYS, keys % GROUP_KEYS
    groups, last = scores.split([count * GROUP_KEYS, remainder], -1)
    maxima = groups.unflatten(-1, (count, GROUP_KEYS)).amax(-1)
    return torch.cat([maxima, last.amax(-1, keepdim=True)], -1) if remainder else maxima
