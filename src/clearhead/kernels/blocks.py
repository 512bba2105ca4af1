"""Walking over the score matrix in blocks: whole rows of a few heads at a time.

A block holds all the keys its queries can see, so a plain softmax is enough, and the columns that the mask rules out
altogether are skipped. Shared by the `chunked` kernel and by everything that looks at weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import AttentionCall
from ..masks.grid import Block

__all__ = ["HeadSpan", "block_scores", "block_weights", "exact_dtype", "head_spans", "row_slices", "score_blocks"]

#: Elements of the score matrix held at once; four to six temporaries of this size live at a time.
BLOCK_ELEMENTS = 1 << 20
_ROWS = 256  # enough rows for an efficient matrix product
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class HeadSpan:
    """Some batch items and whole groups of heads; the query heads are those of the key/value heads."""

    batch: slice
    kv_heads: slice
    group: int

    @property
    def heads(self) -> slice:
        return slice(self.kv_heads.start * self.group, self.kv_heads.stop * self.group)

    def query(self, tensor: Tensor) -> Tensor:
        """Cut a (B, H, …) tensor to (b, h, …)."""
        return tensor[self.batch, self.heads]

    def key(self, tensor: Tensor) -> Tensor:
        """Cut a (B, Hkv, …) tensor to (b, hkv, …)."""
        return tensor[self.batch, self.kv_heads]


def head_spans(call: AttentionCall) -> Iterator[HeadSpan]:
    """Split batch and heads so that a span's blocks fit the budget with rows enough."""
    batch, kv_heads, group = call.query.shape[0], call.key.shape[1], call.group
    per_group = group * max(1, min(_ROWS, call.grid.query_length) * call.grid.key_length)
    groups = max(1, BLOCK_ELEMENTS // per_group)
    items = max(1, groups // kv_heads)
    groups = min(groups, kv_heads)
    for item in range(0, batch, items):
        for head in range(0, kv_heads, groups):
            yield HeadSpan(slice(item, min(item + items, batch)), slice(head, min(head + groups, kv_heads)), group)


def row_slices(call: AttentionCall, span: HeadSpan, count: int) -> Iterator[slice]:
    """Split `count` rows into blocks that fit the budget."""
    items = span.batch.stop - span.batch.start
    per_row = items * (span.heads.stop - span.heads.start) * max(1, call.grid.key_length)
    step = max(min(_FEWEST_ROWS, count), min(BLOCK_ELEMENTS // per_row, count), 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def block_scores(call: AttentionCall, block: Block, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
    """Masked scores of a block and, with a soft-cap, tanh's value for the backward pass.

    Args:
        call: scale, soft-cap and mask.
        block: rows, columns, heads and batch items.
        query: (b, h, l, D) in the compute dtype.
        key: (b, hkv, s, D) in the compute dtype.

    Returns:
        s (b, h, l, s) with −∞ where hidden, and tanh(s/c) before bias and mask, or ``None``.
    """
    # Scaled after the product: a scaled query would be rounded once more.
    scores = grouped(query, key.transpose(-2, -1)).mul_(call.scale)
    squashed = None
    if call.softcap is not None:
        squashed = scores.div_(call.softcap).tanh_()
        scores = squashed * call.softcap
    if call.mask is not None:
        bias = call.mask.bias(block, scores.dtype)
        if bias is not None:
            scores += bias
        visible = call.mask.visible(block)
        if visible is not None:
            scores.masked_fill_(~visible, float("-inf"))
    return scores, squashed


def block_weights(call: AttentionCall, block: Block, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of whole rows, in place: p (b, h, l, s) and lse (b, h, l, 1)."""
    sinks = None
    if call.sinks is not None:
        sinks = call.sinks[block.heads].to(scores.dtype)[None, :, None, None]
    if scores.shape[-1] == 0:
        peak = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    else:
        peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    peak.masked_fill_(peak == float("-inf"), 0)
    terms = scores.sub_(peak).exp_()
    total = terms.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks - peak).exp()
    empty = total == 0
    divisor = total.masked_fill(empty, 1)
    lse = (peak + divisor.log()).masked_fill_(empty, float("-inf"))
    return terms.div_(divisor), lse


def exact_dtype(call: AttentionCall) -> torch.dtype:
    """float64 up to 1024 keys, where it costs milliseconds, the compute dtype beyond.

    The error of a score is a relative error of its weight, and float32 products of long vectors are not exact enough
    for weights to 1e-6.
    """
    return torch.float64 if call.grid.key_length <= 1024 else call.compute_dtype


def score_blocks(
    call: AttentionCall, chosen: Tensor | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[Block, slice, Tensor, Tensor]]:
    """Walk over all rows of the score matrix, or over chosen ones.

    Args:
        call: the request.
        chosen: row numbers (n,), or ``None`` for all.
        dtype: of the query and key that come out. Default the compute dtype.

    Yields:
        The block, its place among the (chosen) rows, and its query (b, h, l, D) and key (b, hkv, s, D).
    """
    dtype = dtype or call.compute_dtype
    count = call.grid.query_length if chosen is None else len(chosen)
    for span in head_spans(call):
        key = span.key(call.key).to(dtype).contiguous()
        for place in row_slices(call, span, count):
            start, stop = 0, call.grid.key_length
            rows = place if chosen is None else chosen[place]
            if call.mask is not None and isinstance(rows, slice):
                start, stop = call.mask.key_span(call.grid, rows)
            block = Block(call.grid, span.batch, span.heads, rows, slice(start, stop))
            yield block, place, span.query(call.query)[:, :, rows].to(dtype), key[:, :, start:stop]


def grouped(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product of (b, h, n, m) with (b, hkv, m, k), each key/value head serving its group: (b, h, n, k)."""
    batch, heads, rows, inner = left.shape
    kv_heads = right.shape[1]
    folded = left.reshape(batch, kv_heads, heads // kv_heads * rows, inner)  # (b, hkv, G·n, m)
    return (folded @ right).view(batch, heads, rows, right.shape[-1])


def grouped_transposed(left: Tensor, right: Tensor, kv_heads: int) -> Tensor:
    """Σ over a group's heads and rows of leftᵀ right: (b, h, n, m), (b, h, n, k) → (b, hkv, m, k)."""
    batch, heads, rows, inner = left.shape
    shape = (batch, kv_heads, heads // kv_heads * rows)
    return left.reshape(*shape, inner).transpose(-2, -1) @ right.reshape(*shape, right.shape[-1])
