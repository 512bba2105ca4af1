# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false
"""The kernels of `weights_gradients`: with dp the gradient of the weights p, ds = p (dp − Σ_j p dp). No atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import ScoreArguments, changed, load_rows, products, tanh_of, viewers_of, visible_cells, visited


@triton.jit
def _weights_of(s, i, j, row, b, h, args, gradient, g_b, g_h, g_l, g_s, share, SOFTCAP: tl.constexpr):
    """From the products s of a tile: the weights, their gradient, and the derivative of the soft-cap."""
    if SOFTCAP:
        tanh = tanh_of(s * args.scale, args.softcap)
        slope = 1.0 - tanh * tanh
    else:
        slope = 1.0
    s = changed(s, i, j, b, h, args, SOFTCAP)
    seen = visible_cells(i, j, b, h, args)
    weights = tl.exp2(tl.where(seen, s, float("-inf")) - row)
    offset = b.to(tl.int64) * g_b + h.to(tl.int64) * g_h + i.to(tl.int64) * g_l + j.to(tl.int64) * g_s
    of_weights = tl.load(gradient + offset, mask=seen, other=0.0).to(tl.float32) * share
    return weights, of_weights, slope


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift", "g_b", "g_h", "g_l"])
def query_gradient_kernel(
    query, key, lse, gradient, means, out, g_b, g_h, g_l, g_s, share, factor,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write Σ_j p dp to `means` (B, H, L), and `factor` · Σ_j ds k_j to `out` (B, H, L, D).

    `lse` (B, H, L) is the log-sum-exp × log2 e, and ∞ for queries without a key. dp is `share` · `gradient`.
    """
    args = ScoreArguments(
        L, S, low, high, stop, shift, scale, softcap, first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
        query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    )  # fmt: skip
    tiles = tl.cdiv(L, M)
    program = tl.program_id(0)
    # Under a causal mask the last rows have the most keys, so they begin first.
    tile, bh = tiles - 1 - program % tiles, program // tiles
    b, h = bh // H, bh % H
    i0 = tile * M
    i = i0 + tl.arange(0, M)
    line = bh.to(tl.int64) * L + i
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    key += b.to(tl.int64) * k_b + (h // PER_KV).to(tl.int64) * k_h
    q = load_rows(query, i0, L, q_l, D, M, BLOCK_D, True)
    row = tl.load(lse + line, mask=i < L, other=float("inf"))
    begin, end, _, _ = visited(i, i0, tl.minimum(i0 + M, L) - 1, b, args, N)
    mean, total = tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_D], tl.float32)
    for turn in tl.range(0, 2):
        for j0 in tl.range(begin, end, N, num_stages=STAGES):
            k = load_rows(key, j0, S, k_s, D, N, BLOCK_D, True)
            weights, of_weights, slope = _weights_of(
                products(q, k, UPCAST), i[:, None], (j0 + tl.arange(0, N))[None, :], row[:, None],
                b, h, args, gradient, g_b, g_h, g_l, g_s, share, SOFTCAP,
            )  # fmt: skip
            if turn == 0:
                mean += tl.sum(weights * of_weights, 1)
            else:
                of_scores = weights * (of_weights - mean[:, None]) * slope
                total = tl.dot(of_scores, k.to(tl.float32), total, input_precision=PRECISION)
    tl.store(means + line, mean, mask=i < L)
    feature = tl.arange(0, BLOCK_D)
    written = (i < L)[:, None] & (feature < D)[None, :]
    tl.store(out + line[:, None] * D + feature[None, :], total * factor, mask=written)


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift", "g_b", "g_h", "g_l"])
def key_gradient_kernel(
    query, key, lse, gradient, means, out, g_b, g_h, g_l, g_s, share,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    first_query, last_query, query_range_b,
    H: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    ROWS_ALIKE: tl.constexpr,
):  # fmt: skip
    """Write `scale` · Σ_i ds q_i, over the queries of the `PER_KV` heads of a key/value head, to `out` (B, Hkv, S, D).

    `lse` and dp are those of `query_gradient_kernel`, which has written `means`. Rows share one range if `ROWS_ALIKE`.
    """
    args = ScoreArguments(
        L, S, low, high, stop, shift, scale, softcap, first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
        query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    )  # fmt: skip
    tiles = tl.cdiv(S, N)
    program = tl.program_id(0)
    # Under a causal mask the first keys have the most queries, and they begin first.
    tile, part = program % tiles, program // tiles
    b, kv_head = part // (H // PER_KV), part % (H // PER_KV)
    j0 = tile * N
    j1 = tl.minimum(j0 + N, S) - 1
    j = j0 + tl.arange(0, N)
    k = load_rows(key + b.to(tl.int64) * k_b + kv_head.to(tl.int64) * k_h, j0, S, k_s, D, N, BLOCK_D, True)
    begin, end, _, _ = viewers_of(j, j0, j1, b, args, first_query, last_query, query_range_b, ROWS_ALIKE)
    total = tl.zeros([N, BLOCK_D], tl.float32)
    for number in tl.range(0, PER_KV):
        h = kv_head * PER_KV + number
        of_head = query + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
        lines = (b * H + h).to(tl.int64) * L
        for i0 in tl.range(begin // M * M, end, M, num_stages=STAGES):
            i = i0 + tl.arange(0, M)
            q = load_rows(of_head, i0, L, q_l, D, M, BLOCK_D, True)
            row = tl.load(lse + lines + i, mask=i < L, other=float("inf"))
            mean = tl.load(means + lines + i, mask=i < L, other=0.0)
            weights, of_weights, slope = _weights_of(
                products(k, q, UPCAST), i[None, :], j[:, None], row[None, :],
                b, h, args, gradient, g_b, g_h, g_l, g_s, share, SOFTCAP,
            )  # fmt: skip
            of_scores = weights * (of_weights - mean[None, :]) * slope
            total = tl.dot(of_scores, q.to(tl.float32), total, input_precision=PRECISION)
    feature = tl.arange(0, BLOCK_D)
    line = part.to(tl.int64) * S + j
    written = (j < S)[:, None] & (feature < D)[None, :]
    tl.store(out + line[:, None] * D + feature[None, :], total * scale, mask=written)
