# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false
"""The kernel of `columns`: one program for each tile of keys, which passes over the queries once. No atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import LOG2E, ScoreArguments, changed, load_rows, products, viewers_of, visible_cells


@triton.jit
def _over_queries(
    received, viewers, k, start, end, j, b, h, args, query, q_l, lse,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    ALL: tl.constexpr, SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, HIDES: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Received mass and viewers of each key after queries start … end."""
    for begin in tl.range(start, end, M, num_stages=STAGES):
        q = load_rows(query, begin, args.L, q_l, D, M, BLOCK_D, HIDES)
        i = begin + tl.arange(0, M)
        row = tl.load(lse + i, mask=i < args.L, other=float("inf"))
        s = products(k, q, UPCAST)  # (keys, queries): the sum over queries stays within a thread
        factor = args.scale * LOG2E
        if not PLAIN:
            s = changed(s, i[None, :], j[:, None], b, h, args, SOFTCAP)
            factor = 1.0
        if HIDES:
            seen = visible_cells(i[None, :], j[:, None], b, h, args)
            s = tl.where(seen, s, float("-inf"))
            is_viewer = (s > float("-inf")) & (row != float("inf"))[None, :]
            viewers += tl.sum(is_viewer.to(tl.float32), 1)
        elif ALL:  # every key of the tile is visible to every query
            viewers += M
        else:
            viewers += tl.sum((row != float("inf")).to(tl.float32), 0)
        received += tl.sum(tl.exp2(s * factor - row[None, :]), 1)
    return received, viewers


@triton.jit
def _bounds_of(
    j, j0, j1, b, args, first_query, last_query, query_range_b,
    M: tl.constexpr, ROWS_ALIKE: tl.constexpr, NEVER_FULL: tl.constexpr,
):  # fmt: skip
    """The queries begin … end − 1 that see any of the keys j0 … j1, and full … full_end − 1 that see every key."""
    full, full_end = tl.maximum(0, j1 - args.high), tl.minimum(args.L, j0 - args.low + 1)
    begin, end, from_, limit = viewers_of(j, j0, j1, b, args, first_query, last_query, query_range_b, ROWS_ALIKE)
    begin = begin // M * M
    full, full_end = tl.cdiv(full, M) * M, tl.maximum(full_end, 0) // M * M
    if NEVER_FULL:
        full, full_end = end, end
    if (full_end <= full) | (j1 >= limit) | (j0 < from_):
        full, full_end = end, end
    return begin, full, full_end, end


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift"])
def columns_kernel(
    query, key, lse, received_out, viewers_out,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    first_query, last_query, query_range_b,
    H: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr, ROWS_ALIKE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Write what each key receives, and to how many counted queries it is visible.

    `lse` is the log-sum-exp × log2 e; it is ∞ for queries without a key and for those that are not counted. Rows share
    one range if `ROWS_ALIKE`. All queries are counted if `ALL`.
    """
    args = ScoreArguments(
        L, S, low, high, stop, shift, scale, softcap, first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
        query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    )  # fmt: skip
    tiles = tl.cdiv(S, N)
    program = tl.program_id(0)
    # Under a causal mask the first keys have the most queries, and they begin first.
    tile, bh = program % tiles, program // tiles
    b, h = bh // H, bh % H
    j0 = tile * N
    j1 = tl.minimum(j0 + N, S) - 1
    j = j0 + tl.arange(0, N)
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    key += b.to(tl.int64) * k_b + (h // PER_KV).to(tl.int64) * k_h
    lse += bh.to(tl.int64) * L
    k = load_rows(key, j0, S, k_s, D, N, BLOCK_D, True)
    PLAIN: tl.constexpr = (not SOFTCAP) and (bias is None) and (slopes is None)
    NEVER_FULL: tl.constexpr = (
        (keys is not None) or (visible is not None) or (bias is not None) or (query_documents is not None)
        or ((last is not None) and (not ROWS_ALIKE))
    )  # fmt: skip
    bounds = _bounds_of(j, j0, j1, b, args, first_query, last_query, query_range_b, M, ROWS_ALIKE, NEVER_FULL)
    received, viewers = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    for part in tl.static_range(1 if NEVER_FULL else 3):  # every key of the second part is visible
        received, viewers = _over_queries(
            received, viewers, k, bounds[part], bounds[part + 1], j, b, h, args, query, q_l, lse,
            D, BLOCK_D, M, ALL, SOFTCAP, PLAIN, part != 1, UPCAST, STAGES,
        )  # fmt: skip
    tl.store(received_out + bh.to(tl.int64) * S + j, received, mask=j < S)
    tl.store(viewers_out + bh.to(tl.int64) * S + j, viewers, mask=j < S)
