# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
"""The kernels of `weights` and `pooled`: one program for each tile of the weights, or for each tile of cells."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import ScoreArguments, changed, load_rows, products, visible_cells


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift"])
def weights_kernel(
    query, key, lse, out,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the mean weights of each `HEADS` heads (1 or H) to `out` (B, H / HEADS, L, S).

    `lse` (B, H, L) is the log-sum-exp × log2 e, and ∞ for queries without a key.
    """
    args = ScoreArguments(
        L, S, low, high, stop, shift, scale, softcap, first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
        query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    )  # fmt: skip
    tiles, row_tiles = tl.cdiv(S, N), tl.cdiv(L, M)
    program = tl.program_id(0)
    j0 = program % tiles * N
    i0 = program // tiles % row_tiles * M
    part = program // tiles // row_tiles
    b, first_head = part // (H // HEADS), part % (H // HEADS) * HEADS
    i, j = i0 + tl.arange(0, M), j0 + tl.arange(0, N)
    i1, j1 = tl.minimum(i0 + M, L) - 1, tl.minimum(j0 + N, tl.minimum(S, stop)) - 1
    heads = tl.where((j0 <= i1 + high) & (j1 >= i0 + low) & (j0 <= j1), HEADS, 0)  # none if the band hides the tile
    total = tl.zeros([M, N], tl.float32)
    for n in tl.range(0, heads, num_stages=STAGES):
        h = first_head + n
        of_head = query + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
        q = load_rows(of_head, i0, L, q_l, D, M, BLOCK_D, True)
        k = load_rows(key + b.to(tl.int64) * k_b + (h // PER_KV).to(tl.int64) * k_h, j0, S, k_s, D, N, BLOCK_D, True)
        row = tl.load(lse + (b.to(tl.int64) * H + h) * L + i, mask=i < L, other=float("inf"))
        s = changed(products(q, k, UPCAST), i[:, None], j[None, :], b, h, args, SOFTCAP)
        seen = visible_cells(i[:, None], j[None, :], b, h, args)
        total += tl.exp2(tl.where(seen, s, float("-inf")) - row[:, None])
    lines = out + (part.to(tl.int64) * L + i) * S
    tl.store(lines[:, None] + j[None, :], total * (1.0 / HEADS), mask=(i < L)[:, None] & (j < S)[None, :])


@triton.jit(
    do_not_specialize=[
        "L", "S", "low", "high", "stop", "shift", "lines", "columns", "lines_at_once", "columns_at_once",
    ]
)  # fmt: skip
def map_kernel(
    query, key, lse, out, lines, columns, lines_at_once, columns_at_once,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LARGEST: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the sum, or the largest, of the weights of each cell to `out` (B, H, lines, columns).

    Query i belongs to line ⌊i · lines / L⌋, and key j to column ⌊j · columns / S⌋. A program has `lines_at_once` lines
    and `columns_at_once` columns. If it has several, their queries or keys fit into one tile. `lse` (B, H, L) is the
    log-sum-exp × log2 e, and ∞ for queries without a key and for those that are not counted.
    """
    args = ScoreArguments(
        L, S, low, high, stop, shift, scale, softcap, first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
        query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    )  # fmt: skip
    across, down = tl.cdiv(columns, columns_at_once), tl.cdiv(lines, lines_at_once)
    program = tl.program_id(0)
    column0 = program % across * columns_at_once
    line0 = program // across % down * lines_at_once
    bh = program // across // down
    b, h = bh // H, bh % H
    line1, column1 = tl.minimum(line0 + lines_at_once, lines), tl.minimum(column0 + columns_at_once, columns)
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    key += b.to(tl.int64) * k_b + (h // PER_KV).to(tl.int64) * k_h
    lse += bh.to(tl.int64) * L

    start, end = _first_of(line0, L, lines), _first_of(line1, L, lines)
    left, right = _first_of(column0, S, columns), _first_of(column1, S, columns)
    seen_until = tl.minimum(right, stop)
    if (left > end - 1 + high) | (seen_until - 1 < start + low):  # the band hides all cells
        seen_until = left
    pooled = tl.zeros([M, N], tl.float32)
    for i0 in range(start, end, M):
        i = i0 + tl.arange(0, M)
        q = load_rows(query, i0, L, q_l, D, M, BLOCK_D, True)
        row = tl.load(lse + i, mask=i < end, other=float("inf"))
        for j0 in tl.range(left, seen_until, N, num_stages=STAGES):
            j = j0 + tl.arange(0, N)
            k = load_rows(key, j0, S, k_s, D, N, BLOCK_D, True)
            s = changed(products(q, k, UPCAST), i[:, None], j[None, :], b, h, args, SOFTCAP)
            seen = visible_cells(i[:, None], j[None, :], b, h, args)
            seen = seen & (i < end)[:, None] & (j < seen_until)[None, :]  # the rest may hold NaN of other cells
            weights = tl.exp2(tl.where(seen, s, float("-inf")) - row[:, None])
            pooled = _joined(pooled, weights, LARGEST)
    _write_cells(
        pooled, out, start + tl.arange(0, M), left + tl.arange(0, N), bh, L, S, lines, columns,
        line0, line1, column0, column1, lines_at_once, columns_at_once, LARGEST,
    )  # fmt: skip


@triton.jit
def _write_cells(
    pooled, out, i, j, bh, L, S, lines, columns,
    line0, line1, column0, column1, lines_at_once, columns_at_once, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write the number of each cell of a program, from the weights of its tile."""
    for column in range(column0, column1):
        of_column = _belongs(j, column, S, columns, columns_at_once)
        of_rows = _pool(tl.where(of_column[None, :], pooled, 0.0), 1, LARGEST)
        for line in range(line0, line1):
            of_line = _belongs(i, line, L, lines, lines_at_once)
            number = _pool(tl.where(of_line, of_rows, 0.0), 0, LARGEST)
            tl.store(out + (bh.to(tl.int64) * lines + line) * columns + column, number)


@triton.jit
def _first_of(cell, count, cells):
    """The first of `count` queries or keys that belongs to this of so many cells, or to a later one."""
    return tl.cdiv(tl.cast(cell, tl.int64) * count, cells).to(tl.int32)


@triton.jit
def _belongs(places, cell, count, cells, at_once):
    """Which places of a tile belong to a cell: all of them if the tile has one cell."""
    return (places >= _first_of(cell, count, cells)) & (places < _first_of(cell + 1, count, cells)) | (at_once == 1)


@triton.jit
def _joined(pooled, weights, LARGEST: tl.constexpr):
    if LARGEST:
        return tl.maximum(pooled, weights, propagate_nan=tl.PropagateNan.ALL)
    return pooled + weights


@triton.jit
def _pool(numbers, AXIS: tl.constexpr, LARGEST: tl.constexpr):
    if LARGEST:
        # A maximum drops NaN, so it is ∞ for a while. Weights are at most 1.
        largest = tl.max(tl.where(numbers == numbers, numbers, float("inf")), AXIS)
        return tl.where(largest == float("inf"), float("nan"), largest)
    return tl.sum(numbers, AXIS)
