# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
"""The kernels of `top_k`: the largest score of each tile of keys, and the scores of chosen tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import changed, load_rows, products, visible_cells


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift"])
def largest_kernel(
    query, key, out,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the largest score of each row and tile of N keys to `out` (B, H, tiles, L), which holds −∞."""
    tiles = tl.cdiv(L, M)
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = bh // H, bh % H
    i0 = tile * M
    i1 = tl.minimum(i0 + M, L) - 1
    i = i0 + tl.arange(0, M)
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    key += b.to(tl.int64) * k_b + (h // GROUP).to(tl.int64) * k_h
    out += bh.to(tl.int64) * tl.cdiv(S, N) * L
    q = load_rows(query, i0, L, q_l, D, M, BLOCK_D, True)
    begin, end = tl.maximum(0, i0 + low), tl.minimum(tl.minimum(S, stop), i1 + high + 1)
    if first is not None:
        place = b.to(tl.int64) * range_b + tl.minimum(i, i1).to(tl.int64) * range_l
        begin = tl.maximum(begin, tl.min(tl.load(first + place), 0))
        end = tl.minimum(end, tl.max(tl.load(last + place), 0))
    for start in tl.range(begin // N * N, end, N, num_stages=STAGES):
        j = start + tl.arange(0, N)
        s = products(q, load_rows(key, start, S, k_s, D, N, BLOCK_D, True), UPCAST)
        s = changed(
            s, i[:, None], j[None, :], b, h, L, S, shift, scale, softcap,
            bias, bias_b, bias_h, bias_l, bias_s, slopes, SOFTCAP,
        )  # fmt: skip
        seen = visible_cells(
            i[:, None], j[None, :], b, h, L, S, low, high, stop,
            first, last, range_b, range_l, keys, keys_b,
            visible, visible_b, visible_h, visible_l, visible_s,
            query_documents, key_documents, query_documents_b, key_documents_b,
        )  # fmt: skip
        largest = tl.max(tl.where(seen, s, float("-inf")), 1)
        tl.store(out + tl.cast(start // N, tl.int64) * L + i, largest, mask=i < L)


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift", "row", "count", "chosen_count"])
def chosen_kernel(
    query, key, chosen, out, row, count, chosen_count,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the scores of the chosen tiles of rows row … row + count, packed so that a larger one goes first.

    `chosen` holds numbers of tiles, (B, H, count, chosen_count); `out` is int64 (B, H, count, chosen_count, N). A
    packed score has the order of its bits above, and below the key counted from the end: of equal ones the first wins.
    """
    program = tl.program_id(0).to(tl.int64)
    at = program // chosen_count
    i = (row + at % count).to(tl.int32)
    bh = (at // count).to(tl.int32)
    b, h = bh // H, bh % H
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + i.to(tl.int64) * q_l
    key += b.to(tl.int64) * k_b + (h // GROUP).to(tl.int64) * k_h
    start = tl.load(chosen + program).to(tl.int32) * N
    j = start + tl.arange(0, N)
    feature = tl.arange(0, BLOCK_D)
    q = tl.load(query + feature, mask=feature < D, other=0.0).to(tl.float32)
    k = load_rows(key, start, S, k_s, D, N, BLOCK_D, True).to(tl.float32)
    s = tl.sum(k * q[None, :], 1)
    s = changed(
        s, i, j, b, h, L, S, shift, scale, softcap, bias, bias_b, bias_h, bias_l, bias_s, slopes, SOFTCAP
    )  # fmt: skip
    seen = visible_cells(
        i, j, b, h, L, S, low, high, stop,
        first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s,
        query_documents, key_documents, query_documents_b, key_documents_b,
    )  # fmt: skip
    s = tl.where(seen, s, float("-inf")) + 0.0  # −0 is 0
    bits = s.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    packed = (order.to(tl.int64) << 32) | (0x7FFFFFFF - j).to(tl.int64)
    tl.store(out + program * N + tl.arange(0, N), packed)
