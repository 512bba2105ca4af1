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
ScoreArguments = namedtuple(
    "ScoreArguments",
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
def changed(s, i, j, b, h, args, SOFTCAP: tl.constexpr):
    """Products as scores × log2 e: soft-capped, with ALiBi and bias."""
    s = s * args.scale
    if SOFTCAP:
        s = args.softcap * tanh_of(s, args.softcap)
    if args.slopes is not None:
        s -= tl.load(args.slopes + h) * tl.abs(i + args.shift - j).to(tl.float32)
    s *= LOG2E
    if args.bias is not None:
        offset = b.to(tl.int64) * args.bias_b + h.to(tl.int64) * args.bias_h
        offset = offset + i.to(tl.int64) * args.bias_l + j.to(tl.int64) * args.bias_s
        s += tl.load(args.bias + offset, mask=(i < args.L) & (j < args.S), other=0.0).to(tl.float32) * LOG2E
    return s


@triton.jit
def within(place, S):
    """Ends of ranges, which may lie outside the keys, as numbers 0 … S."""
    return tl.maximum(tl.minimum(place, S), 0).to(tl.int32)


@triton.jit
def visible_cells(i, j, b, h, args):
    """Which cells of a tile with rows i and columns j, of shapes that broadcast, the mask shows."""
    seen = (j >= i + args.low) & (j <= i + args.high) & (j < tl.minimum(args.S, args.stop)) & (i < args.L)
    if args.last is not None:
        place = b.to(tl.int64) * args.range_b + i.to(tl.int64) * args.range_l
        seen &= j < tl.load(args.last + place, mask=i < args.L, other=0)
        if args.first is not None:
            seen &= j >= tl.load(args.first + place, mask=i < args.L, other=0)
    if args.keys is not None:
        seen &= tl.load(args.keys + b.to(tl.int64) * args.keys_b + j, mask=j < args.S, other=0) != 0
    if args.query_documents is not None:
        of_query = tl.load(args.query_documents + b.to(tl.int64) * args.query_documents_b + i, mask=i < args.L, other=0)
        of_key = tl.load(args.key_documents + b.to(tl.int64) * args.key_documents_b + j, mask=j < args.S, other=0)
        seen &= of_query == of_key
    if args.visible is not None:
        offset = b.to(tl.int64) * args.visible_b + h.to(tl.int64) * args.visible_h
        offset = offset + i.to(tl.int64) * args.visible_l + j.to(tl.int64) * args.visible_s
        seen &= tl.load(args.visible + offset, mask=(i < args.L) & (j < args.S), other=0) != 0
    return seen


@triton.jit
def visited(i, i0, i1, b, args, N: tl.constexpr):
    """The keys begin … end − 1 that any of the rows i0 … i1 sees, and full … full_end − 1 that every row sees.

    All but `end` are at the begin of a tile.
    """
    limit = tl.minimum(args.S, args.stop)
    begin, end = tl.maximum(0, i0 + args.low), tl.minimum(limit, i1 + args.high + 1)
    full, full_end = tl.maximum(0, i1 + args.low), tl.minimum(limit, i0 + args.high + 1)
    if args.last is not None:
        place = b.to(tl.int64) * args.range_b + tl.minimum(i, i1).to(tl.int64) * args.range_l
        to = within(tl.load(args.last + place), args.S)
        end, full_end = tl.minimum(end, tl.max(to, 0)), tl.minimum(full_end, tl.min(to, 0))
        if args.first is not None:
            from_ = within(tl.load(args.first + place), args.S)
            begin, full = tl.maximum(begin, tl.min(from_, 0)), tl.maximum(full, tl.max(from_, 0))
    return begin // N * N, end, tl.cdiv(full, N) * N, tl.maximum(full_end, 0) // N * N


@triton.jit
def viewers_of(j, j0, j1, b, args, first_query, last_query, query_range_b, ROWS_ALIKE: tl.constexpr):
    """The queries begin … end − 1 that may see any of the keys j0 … j1, and the keys `from_` … `limit` − 1 of all rows.

    Rows share one range of keys if `ROWS_ALIKE`. Otherwise these are all keys.
    """
    begin, end = tl.maximum(0, j0 - args.high), tl.minimum(args.L, j1 - args.low + 1)
    limit, from_ = tl.minimum(args.S, args.stop), 0
    if ROWS_ALIKE:
        limit = tl.minimum(limit, within(tl.load(args.last + b.to(tl.int64) * args.range_b), args.S))
        if args.first is not None:
            from_ = within(tl.load(args.first + b.to(tl.int64) * args.range_b), args.S)
    if first_query is not None:
        place = b.to(tl.int64) * query_range_b + tl.minimum(j, j1)
        begin = tl.maximum(begin, tl.min(tl.load(first_query + place), 0))
        end = tl.minimum(end, tl.max(tl.load(last_query + place), 0))
    if (j0 >= limit) | (j1 < from_):
        end = begin
    return begin, end, from_, limit
