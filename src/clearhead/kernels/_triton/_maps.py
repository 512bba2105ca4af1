# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
"""The kernel of `weights`: one program for each tile of queries and keys, which writes that tile once."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import changed, load_rows, products, visible_cells


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift"])
def weights_kernel(
    query, key, lse, out,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the mean weights of each `HEADS` heads (1 or H) to `out` (B, H / HEADS, L, S).

    `lse` (B, H, L) is the log-sum-exp × log2 e, and ∞ for queries without a key.
    """
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
        k = load_rows(key + b.to(tl.int64) * k_b + (h // GROUP).to(tl.int64) * k_h, j0, S, k_s, D, N, BLOCK_D, True)
        row = tl.load(lse + (b.to(tl.int64) * H + h) * L + i, mask=i < L, other=float("inf"))
        s = changed(
            products(q, k, UPCAST), i[:, None], j[None, :], b, h, L, S, shift, scale, softcap,
            bias, bias_b, bias_h, bias_l, bias_s, slopes, SOFTCAP,
        )  # fmt: skip
        seen = visible_cells(
            i[:, None], j[None, :], b, h, L, S, low, high, stop,
            first, last, range_b, range_l, keys, keys_b,
            visible, visible_b, visible_h, visible_l, visible_s,
            query_documents, key_documents, query_documents_b, key_documents_b,
        )  # fmt: skip
        total += tl.exp2(tl.where(seen, s, float("-inf")) - row[:, None])
    lines = out + (part.to(tl.int64) * L + i) * S
    tl.store(lines[:, None] + j[None, :], total * (1.0 / HEADS), mask=(i < L)[:, None] & (j < S)[None, :])
