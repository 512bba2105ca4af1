# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
"""What the kernels share: the scores of one tile, in units of log2, with −∞ in hidden keys."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
#: Neighbouring keys of which `top_k` keeps the largest score.
GROUP_KEYS: tl.constexpr = tl.constexpr(16)


#: The arguments of a kernel from which `changed` and `visible_cells` compute: sizes, mask and scale.
Call = namedtuple(
    "Call",
    "L S low high stop shift scale softcap first last range_b range_l keys keys_b "
    "visible visible_b visible_h visible_l visible_s bias bias_b bias_h bias_l bias_s "
    "query_documents key_documents query_documents_b key_documents_b slopes",
)


@triton.jit
def load_rows(
    pointer, start, count, stride, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, CUT: tl.constexpr
):
    """Rows start … start + BLOCK of a matrix (count, D), (BLOCK, BLOCK_D); beyond its ends 0."""
    place, feature = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    pointers = pointer + tl.cast(start, tl.int64) * stride + place[:, None] * stride + feature[None, :]
    if BLOCK_D == D:
        if CUT:
            return tl.load(pointers, mask=(start + place < count)[:, None], other=0.0)
        return tl.load(pointers)
    if CUT:
        return tl.load(pointers, mask=(start + place < count)[:, None] & (feature < D)[None, :], other=0.0)
    return tl.load(pointers, mask=(feature < D)[None, :], other=0.0)


@triton.jit
def products(left, right, UPCAST: tl.constexpr):
    """The product left · rightᵀ in float32: IEEE products of float32, and exact ones of 16-bit numbers."""
    if UPCAST:  # the interpreter multiplies the bits of bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, tl.trans(right), input_precision="ieee")


@triton.jit
def tanh_of(s, softcap):
    """tanh(s / softcap)."""
    t = tl.exp2(tl.abs(s) * (-2.0 * LOG2E / softcap))
    magnitude = (1.0 - t) / (1.0 + t)
    return tl.where(s < 0, -magnitude, magnitude)


@triton.jit
def changed(s, i, j, b, h, call, SOFTCAP: tl.constexpr):
    """Products as scores × log2 e: soft-capped, with ALiBi and bias."""
    s = s * call.scale
    if SOFTCAP:
        s = call.softcap * tanh_of(s, call.softcap)
    if call.slopes is not None:
        s -= tl.load(call.slopes + h) * tl.abs(i + call.shift - j).to(tl.float32)
    s *= LOG2E
    if call.bias is not None:
        offset = b.to(tl.int64) * call.bias_b + h.to(tl.int64) * call.bias_h
        offset = offset + i.to(tl.int64) * call.bias_l + j.to(tl.int64) * call.bias_s
        s += tl.load(call.bias + offset, mask=(i < call.L) & (j < call.S), other=0.0).to(tl.float32) * LOG2E
    return s


@triton.jit
def within(place, S):
    """Ends of ranges, which may lie outside the keys, as numbers 0 … S."""
    return tl.maximum(tl.minimum(place, S), 0).to(tl.int32)


@triton.jit
def visible_cells(i, j, b, h, call):
    """Which cells of a tile with rows i and columns j, of shapes that broadcast, the mask shows."""
    seen = (j >= i + call.low) & (j <= i + call.high) & (j < tl.minimum(call.S, call.stop)) & (i < call.L)
    if call.last is not None:
        place = b.to(tl.int64) * call.range_b + i.to(tl.int64) * call.range_l
        seen &= j < tl.load(call.last + place, mask=i < call.L, other=0)
        if call.first is not None:
            seen &= j >= tl.load(call.first + place, mask=i < call.L, other=0)
    if call.keys is not None:
        seen &= tl.load(call.keys + b.to(tl.int64) * call.keys_b + j, mask=j < call.S, other=0) != 0
    if call.query_documents is not None:
        of_query = tl.load(call.query_documents + b.to(tl.int64) * call.query_documents_b + i, mask=i < call.L, other=0)
        of_key = tl.load(call.key_documents + b.to(tl.int64) * call.key_documents_b + j, mask=j < call.S, other=0)
        seen &= of_query == of_key
    if call.visible is not None:
        offset = b.to(tl.int64) * call.visible_b + h.to(tl.int64) * call.visible_h
        offset = offset + i.to(tl.int64) * call.visible_l + j.to(tl.int64) * call.visible_s
        seen &= tl.load(call.visible + offset, mask=(i < call.L) & (j < call.S), other=0) != 0
    return seen


@triton.jit
def visited(i, i0, i1, b, call, N: tl.constexpr):
    """The keys begin … end − 1 that any of the rows i0 … i1 sees, and whole … whole_end − 1 that every row sees.

    All but `end` are at the begin of a tile.
    """
    limit = tl.minimum(call.S, call.stop)
    begin, end = tl.maximum(0, i0 + call.low), tl.minimum(limit, i1 + call.high + 1)
    whole, whole_end = tl.maximum(0, i1 + call.low), tl.minimum(limit, i0 + call.high + 1)
    if call.last is not None:
        place = b.to(tl.int64) * call.range_b + tl.minimum(i, i1).to(tl.int64) * call.range_l
        to = within(tl.load(call.last + place), call.S)
        end, whole_end = tl.minimum(end, tl.max(to, 0)), tl.minimum(whole_end, tl.min(to, 0))
        if call.first is not None:
            from_ = within(tl.load(call.first + place), call.S)
            begin, whole = tl.maximum(begin, tl.min(from_, 0)), tl.maximum(whole, tl.max(from_, 0))
    return begin // N * N, end, tl.cdiv(whole, N) * N, tl.maximum(whole_end, 0) // N * N


@triton.jit
def viewers_of(j, j0, j1, b, call, first_query, last_query, query_range_b, ROWS_ALIKE: tl.constexpr):
    """The queries begin … end − 1 that may see any of the keys j0 … j1, and the keys `from_` … `limit` − 1 of all rows.

    Rows share one range of keys if `ROWS_ALIKE`. Otherwise these are all keys.
    """
    begin, end = tl.maximum(0, j0 - call.high), tl.minimum(call.L, j1 - call.low + 1)
    limit, from_ = tl.minimum(call.S, call.stop), 0
    if ROWS_ALIKE:
        limit = tl.minimum(limit, within(tl.load(call.last + b.to(tl.int64) * call.range_b), call.S))
        if call.first is not None:
            from_ = within(tl.load(call.first + b.to(tl.int64) * call.range_b), call.S)
    if first_query is not None:
        place = b.to(tl.int64) * query_range_b + tl.minimum(j, j1)
        begin = tl.maximum(begin, tl.min(tl.load(first_query + place), 0))
        end = tl.minimum(end, tl.max(tl.load(last_query + place), 0))
    if (j0 >= limit) | (j1 < from_):
        end = begin
    return begin, end, from_, limit
