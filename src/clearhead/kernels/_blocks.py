"""Walking over the score matrix in blocks: whole rows of a few heads at a time.

A block holds every visible key of its queries, so its softmax is complete. Columns that the mask hides from all its
queries are skipped. The `chunked` kernel and all code that computes weights use these blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from .._call.call import Call
from ..errors import KernelError
from ..masks._bound import BoundMask
from ..masks._grid import Block
from ..masks._lowering import ENOUGH_ROWS, row_blocks
from ..masks._structure import Band
from ._base import of_rows, refusals_of_formula

#: The optional parts of the formula that `block_scores` and what follows it compute.
BLOCK_FORMULA = frozenset({"softcap", "sinks", "row_sinks"})
#: Elements of the score matrix in memory. Four to six temporaries of this size exist together.
BLOCK_ELEMENTS = 1 << 20
#: The same on a GPU. There every operator costs a launch, and small blocks leave the GPU idle.
GPU_BLOCK_ELEMENTS = 1 << 26
#: On the CPU, weights of at most this number of keys are scored in float64, which then takes milliseconds.
EXACT_KEYS = 1024
_ROWS = 128  # enough rows for an efficient matrix product, few enough for heads to share a block of the mask
_FEWEST_ROWS = 16
_GPU_ROWS = 1024  # fewer rows save less arithmetic under a mask than their launches cost
_RUN = 64  # blocks whose sums are added before they go to a total
_TERMS = 512  # of a product that are summed by PyTorch's GEMM


@dataclass(frozen=True)
class HeadSpan:
    """Some batch items and whole groups of heads; the query heads are those of the key/value heads."""

    batch: slice
    kv_heads: slice
    group: int

    @property
    def heads(self) -> slice:
        return slice(self.kv_heads.start * self.group, self.kv_heads.stop * self.group)

    @property
    def matrices(self) -> int:
        """How many matrices of scores, one for each batch item and query head."""
        return (self.batch.stop - self.batch.start) * (self.heads.stop - self.heads.start)

    def query(self, tensor: Tensor) -> Tensor:
        """Cut a (B, H, …) tensor to (b, h, …)."""
        return tensor[self.batch, self.heads]

    def key(self, tensor: Tensor) -> Tensor:
        """Cut a (B, Hkv, …) tensor to (b, hkv, …)."""
        return tensor[self.batch, self.kv_heads]


@final
class Workspace:
    """Memory and mask of one block, for use by the next.

    Fresh memory can cost a CPU more than the arithmetic. The mask is reused because all blocks of a window hide the
    same cells.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._band: Band | None = None
        self._bound: BoundMask | None = None
        self._outline: tuple[int, ...] | None = None
        self._limit: Tensor | None = None

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """A tensor of this shape with undefined contents, valid until the next call."""
        count = math.prod(shape)
        if self._memory is None or self._memory.numel() < count:
            self._memory = like.new_empty(count)
        return self._memory[:count].view(shape)

    def limit(self, bound: BoundMask, block: Block, dtype: torch.dtype) -> Tensor | None:
        """Upper bounds of scores (b, h, l, s), −∞ where hidden and ∞ elsewhere. ``None`` if nothing is hidden."""
        if bound is not self._bound:
            self._band, self._bound = bound.band, bound
        # Neighbouring blocks of a band hide the same cells, counted from their corners.
        outline = None if self._band is None else self._band.outline(block)
        if outline is None or outline != self._outline:
            visible = bound.visible(block)
            self._outline, self._limit = outline, None if visible is None else _limit(visible, dtype)
        return self._limit


def _limit(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(visible.shape, float("inf"), dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )


@final
class LongSum:
    """A sum over many blocks whose error does not grow with their number.

    Blocks are added to `run`. After `_RUN` blocks, `run` is added to a total with Knuth's compensation.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.run = zeros
        self._blocks = 0
        self._total: Tensor | None = None
        self._lost = zeros

    def end_block(self) -> None:
        """Note that a block was added to `run`."""
        self._blocks += 1
        if self._blocks % _RUN:
            return
        if self._total is None:
            self._total, self._lost = torch.zeros_like(self.run), torch.zeros_like(self.run)
        total = self._total + self.run
        added = total - self._total
        self._lost += (self._total - (total - added)) + (self.run - added)
        self._total = total
        self.run.zero_()

    def result(self) -> Tensor:
        """The sum of all blocks."""
        return self.run if self._total is None else self._total + (self._lost + self.run)


def _on_cpu(call: Call) -> bool:
    return call.query.device.type == "cpu"


def _budget(call: Call) -> int:
    """The most elements of a block."""
    return BLOCK_ELEMENTS if _on_cpu(call) else GPU_BLOCK_ELEMENTS


def _row_blocks(call: Call, matrices: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Cut the rows into blocks that fit the budget with this number of matrices."""
    enough = ENOUGH_ROWS if _on_cpu(call) else _GPU_ROWS
    return row_blocks(call.bound, _budget(call) // max(1, matrices), _FEWEST_ROWS, enough)


def head_spans(call: Call) -> Iterator[HeadSpan]:
    """Split batch and heads so that blocks of enough rows fit the budget."""
    for refusal in refusals_of_formula(call.layout, BLOCK_FORMULA):
        raise KernelError(f"blocks of scores, and statistics from them: {refusal}.")
    rows = _row_blocks(call, call.layout.group)
    cells = max((min(_ROWS, chunk.stop - chunk.start) * (stop - start) for chunk, (start, stop) in rows), default=0)
    return _spans(call, cells)


def _spans(call: Call, cells: int) -> Iterator[HeadSpan]:
    """Split batch and heads so that blocks of `cells` cells in each head fit the budget."""
    batch, kv_heads, group = call.query.shape[0], call.key.shape[1], call.layout.group
    groups = max(1, _budget(call) // max(1, group * cells))
    items = max(1, groups // kv_heads)
    groups = min(groups, kv_heads)
    for item in range(0, batch, items):
        for head in range(0, kv_heads, groups):
            yield HeadSpan(slice(item, min(item + items, batch)), slice(head, min(head + groups, kv_heads)), group)


def span_blocks(call: Call, span: HeadSpan) -> Iterator[tuple[slice, Block]]:
    """Split the rows of a span into blocks of visible columns that fit the budget, and yield rows and block."""
    for rows, (start, stop) in _row_blocks(call, span.matrices):
        yield rows, Block(call.grid, span.batch, span.heads, rows, slice(start, stop))


def _chosen_blocks(call: Call, span: HeadSpan, chosen: Tensor) -> Iterator[tuple[slice, Block]]:
    """Split chosen rows into blocks of all columns that fit the budget, and yield their slice and the block."""
    columns = slice(0, call.grid.key_length)
    step = max(_FEWEST_ROWS, _budget(call) // max(1, span.matrices * call.grid.key_length))
    for start in range(0, len(chosen), step):
        rows = slice(start, min(start + step, len(chosen)))
        yield rows, Block(call.grid, span.batch, span.heads, chosen[rows], columns)


def block_scores(
    call: Call, block: Block, query: Tensor, key: Tensor, workspace: Workspace | None = None
) -> tuple[Tensor, Tensor | None]:
    """Masked scores of a block and, with a soft-cap, tanh's value for the backward pass.

    Args:
        call: scale, soft-cap and mask.
        block: rows, columns, heads and batch items.
        query: (b, h, l, D) in the compute dtype.
        key: (b, hkv, s, D) in the compute dtype.
        workspace: of the previous block, whose memory the scores take. Default: a new workspace.

    Returns:
        s (b, h, l, s) with −∞ where hidden, and tanh(s/c) before bias and mask, or ``None``.
    """
    workspace = workspace or Workspace()
    scores = grouped(query, key.transpose(-2, -1), call.layout.scale, workspace)
    tanh = None
    if call.layout.softcap is not None:
        tanh = scores.div_(call.layout.softcap).tanh_()
        scores = tanh * call.layout.softcap
    if call.mask is not None:
        bias = call.mask.bias(block, scores.dtype)
        if bias is not None:
            scores += bias
        limit = workspace.limit(call.bound, block, scores.dtype)
        if limit is not None:
            torch.minimum(scores, limit, out=scores)
    return scores, tanh


def block_sinks(call: Call, block: Block, dtype: torch.dtype) -> Tensor | None:
    """The sinks of the block's heads, (1, h, 1, 1), or of its rows, (b, h, l, 1); or ``None``."""
    sinks = call.finite_sinks
    return None if sinks is None else block.cut(of_rows(sinks)[..., None]).to(dtype)


def exact_dtype(call: Call) -> torch.dtype:
    """float64 up to `EXACT_KEYS` on the CPU, the compute dtype beyond and on a GPU, where float64 is slow.

    The error of a score is a relative error of its weight, and float32 products of long vectors are not exact enough
    for weights to 1e-6.
    """
    return torch.float64 if _on_cpu(call) and call.grid.key_length <= EXACT_KEYS else call.layout.compute_dtype


def score_blocks(
    call: Call, chosen: Tensor | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[Block, slice, Tensor, Tensor]]:
    """Walk over all rows of the score matrix, or over chosen ones.

    Args:
        call: all of it.
        chosen: row numbers (n,), or ``None`` for all.
        dtype: of the query and key that come out. Default the compute dtype.

    Yields:
        The block, its slice of the (chosen) rows, and its query (b, h, l, D) and key (b, hkv, s, D).
    """
    dtype = dtype or call.layout.compute_dtype
    # Chosen rows are not neighbours, so all their columns are evaluated.
    spans = head_spans(call) if chosen is None else _spans(call, min(_ROWS, len(chosen)) * call.grid.key_length)
    for span in spans:
        key = span.key(call.key).to(dtype).contiguous()
        blocks = span_blocks(call, span) if chosen is None else _chosen_blocks(call, span, chosen)
        for rows, block in blocks:
            yield block, rows, span.query(call.query)[:, :, block.rows].to(dtype), key[:, :, block.columns]


def grouped(left: Tensor, right: Tensor, scale: float = 1.0, workspace: Workspace | None = None) -> Tensor:
    """Matrix product of (b, h, n, m) with (b, hkv, m, k), times a number, each key/value head serving its group.

    The number multiplies the product, because a scaled factor would be rounded once more.
    """
    batch, heads, rows, inner = left.shape
    kv_heads, width = right.shape[1], right.shape[-1]
    folded = left.reshape(batch * kv_heads, heads // kv_heads * rows, inner)  # (b·hkv, G·n, m)
    if inner > _TERMS:
        return long_product(folded, right.flatten(0, 1)).mul_(scale).view(batch, heads, rows, width)
    result = (workspace or Workspace()).take(left, batch * kv_heads, folded.shape[1], width)
    torch.baddbmm(result, folded, right.flatten(0, 1), beta=0, alpha=scale, out=result)
    return result.view(batch, heads, rows, width)


def grouped_transposed(left: Tensor, right: Tensor, kv_heads: int) -> Tensor:
    """Σ over a group's heads and rows of leftᵀ right: (b, h, n, m), (b, h, n, k) → (b, hkv, m, k)."""
    batch, heads, rows, inner = left.shape
    shape = (batch, kv_heads, heads // kv_heads * rows)
    return long_product(left.reshape(*shape, inner).transpose(-2, -1), right.reshape(*shape, right.shape[-1]))


def long_product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product (…, n, m) by (…, m, k); on the CPU, where PyTorch may add terms singly, in chunks of m."""
    if left.shape[-1] <= _TERMS or left.device.type != "cpu":
        return left @ right
    factors = zip(left.split(_TERMS, -1), right.split(_TERMS, -2), strict=True)
    return torch.stack([rows @ columns for rows, columns in factors]).sum(0)
