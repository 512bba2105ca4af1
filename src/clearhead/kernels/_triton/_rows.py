# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false
"""The kernel of `rows`: one program for each tile of queries, which passes over the keys once."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import GROUP_KEYS, LN2, LOG2E, ScoreArguments, changed, load_rows, products, visible_cells, visited


@triton.jit
def _over_keys(
    m, z, t, d, f, v, q, start, end, i, b, h, args, key, k_s, first_keys, maxima, groups, i0, i1,
    D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr,
    ENTROPY: tl.constexpr, SINK: tl.constexpr, DISTANCE: tl.constexpr, VISIBLE: tl.constexpr,
    SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, HIDES: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The running numbers of each row: largest score, Σ e, Σ e·x, Σ e·distance, mass on first keys, visible keys.

    With `maxima`, also write the largest score of each row and group of keys there.
    """
    for begin in tl.range(start, end, N, num_stages=STAGES):
        k = load_rows(key, begin, args.S, k_s, D, N, BLOCK_D, HIDES)
        j = begin + tl.arange(0, N)
        s = products(q, k, UPCAST)
        factor = args.scale * LOG2E
        if not PLAIN:
            s = changed(s, i[:, None], j[None, :], b, h, args, SOFTCAP)
            factor = 1.0
        if HIDES:
            seen = visible_cells(i[:, None], j[None, :], b, h, args)
            s = tl.where(seen, s, float("-inf"))
        if maxima is None:
            of_row = tl.max(s, 1) * factor
        else:
            of_groups = tl.max(tl.reshape(s, [s.shape[0], N // GROUP_KEYS, GROUP_KEYS]), 2) * factor
            group = begin // GROUP_KEYS + tl.arange(0, N // GROUP_KEYS)
            inside = (i <= i1)[:, None] & (group < groups)[None, :]
            tl.store(maxima + (i - i0)[:, None] * groups + group[None, :], of_groups, mask=inside)
            of_row = tl.max(of_groups, 1)
        largest = tl.maximum(m, of_row)
        anchor = tl.where(largest == float("-inf"), 0.0, largest)
        x = s * factor - anchor[:, None]
        if HIDES:
            x = tl.where(x < -30000.0, -30000.0, x)  # whose power is 0, but whose product with 0 is no NaN
        e = tl.exp2(x)
        decay = tl.exp2(m - anchor)
        if ENTROPY:
            step = tl.where(m == float("-inf"), 0.0, m - anchor)
            t = decay * (t + step * z) + tl.sum(e * x, 1)
        z = decay * z + tl.sum(e, 1)
        if DISTANCE:
            d = decay * d + tl.sum(e * tl.abs(i[:, None] + args.shift - j[None, :]).to(tl.float32), 1)
        if SINK:
            marks = tl.load(first_keys + j, mask=j < args.S, other=0)
            f = decay * f + tl.sum(tl.where((marks != 0)[None, :], e, 0.0), 1)
        if VISIBLE:
            if HIDES:
                v += tl.sum((s > float("-inf")).to(tl.float32), 1)
            else:
                v += N
        m = largest
    return m, z, t, d, f, v


@triton.jit
def _over_visited_keys(
    q, i, i0, i1, b, h, args, key, k_s, first_keys, maxima, groups,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ENTROPY: tl.constexpr, SINK: tl.constexpr, DISTANCE: tl.constexpr, VISIBLE: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The running numbers of each row after all keys that any of the rows sees."""
    begin, end, full, full_end = visited(i, i0, i1, b, args, N)
    PLAIN: tl.constexpr = (not SOFTCAP) and (args.bias is None) and (args.slopes is None)
    NEVER_FULL: tl.constexpr = (
        (args.keys is not None) or (args.visible is not None) or (args.bias is not None)
        or (args.query_documents is not None)
    )  # fmt: skip
    if NEVER_FULL:
        full, full_end = end, end
    if full_end <= full:
        full, full_end = end, end

    m = tl.full([M], float("-inf"), tl.float32)
    z, t, d = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    f, v = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    bounds = (begin, full, full_end, end)
    for part in tl.static_range(1 if NEVER_FULL else 3):  # every key of the second part is visible
        m, z, t, d, f, v = _over_keys(
            m, z, t, d, f, v, q, bounds[part], bounds[part + 1], i, b, h, args,
            key, k_s, first_keys, maxima, groups, i0, i1, D, BLOCK_D, N,
            ENTROPY, SINK, DISTANCE, VISIBLE, SOFTCAP, PLAIN, part != 1, UPCAST, STAGES,
        )  # fmt: skip
    return m, z, t, d, f, v


@triton.jit(
    do_not_specialize=["L", "S", "low", "high", "stop", "shift", "out_n", "row", "count", "groups"],
)
def rows_kernel(
    query, key, sinks, first_keys, out, maxima,
    q_b, q_h, q_l, k_b, k_h, k_s, marks_b, marks_h, out_n, row, count, groups,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LSE: tl.constexpr, ENTROPY: tl.constexpr, MAX_LOGIT: tl.constexpr, CONFIDENCE: tl.constexpr, SINK: tl.constexpr,
    DISTANCE: tl.constexpr, VISIBLE: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the statistics whose number is ≥ 0 to that part of `out` (n, B, H, L), for the rows row … row + count.

    With `maxima` (B, H, count, groups), also write the largest score, times log2 e, of each of those rows and each
    group of keys. Groups of tiles that none of a tile's rows sees are not written.
    """
    args = ScoreArguments(
        L, S, low, high, stop, shift, scale, softcap, first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
        query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    )  # fmt: skip
    tiles = tl.cdiv(count, M)
    program = tl.program_id(0)
    # Under a causal mask the last rows have the most keys, so they begin first.
    tile, bh = tiles - 1 - program % tiles, program // tiles
    b, h = bh // H, bh % H
    i0 = row + tile * M
    i1 = tl.minimum(i0 + M, row + count) - 1
    i = i0 + tl.arange(0, M)
    if maxima is not None:
        maxima += (bh.to(tl.int64) * count + tile * M) * groups
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    key += b.to(tl.int64) * k_b + (h // PER_KV).to(tl.int64) * k_h
    if SINK >= 0:
        first_keys += b.to(tl.int64) * marks_b + h.to(tl.int64) * marks_h
    q = load_rows(query, i0, L, q_l, D, M, BLOCK_D, True)
    m, z, t, d, f, v = _over_visited_keys(
        q, i, i0, i1, b, h, args, key, k_s, first_keys, maxima, groups, D, BLOCK_D, M, N,
        ENTROPY >= 0, SINK >= 0, DISTANCE >= 0, VISIBLE >= 0, SOFTCAP, UPCAST, STAGES,
    )  # fmt: skip
    _write(
        out + bh.to(tl.int64) * L + i, i <= i1, out_n.to(tl.int64), m, z, t, d, f, v, sinks, h,
        LSE, ENTROPY, MAX_LOGIT, CONFIDENCE, SINK, DISTANCE, VISIBLE,
    )  # fmt: skip


@triton.jit
def _write(
    out, inside, out_n, m, z, t, d, f, v, sinks, h,
    LSE: tl.constexpr, ENTROPY: tl.constexpr, MAX_LOGIT: tl.constexpr, CONFIDENCE: tl.constexpr, SINK: tl.constexpr,
    DISTANCE: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """From running numbers to statistics, for rows that may be empty and heads that may have a sink."""
    # With a sink the total can be anchored at the sink, whose power is then 1.
    anchor = m
    if sinks is not None:
        anchor = tl.maximum(m, tl.load(sinks + h).to(tl.float32) * LOG2E)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    decay = tl.exp2(m - anchor)
    total = decay * z
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + h).to(tl.float32) * LOG2E - anchor)
    lse = anchor + tl.log2(total)
    share = tl.where(total == 0.0, 0.0, decay / tl.where(total == 0.0, 1.0, total))
    if LSE >= 0:
        tl.store(out + LSE * out_n, lse * LN2, mask=inside)
    if ENTROPY >= 0:
        # −Σ p ln p = Σ p · (lse − m) − Σ p · (s − m).
        above = tl.where(z == 0.0, 0.0, lse - m)
        entropy = share * (z * above - t) * LN2
        tl.store(out + ENTROPY * out_n, tl.where(entropy < 0.0, 0.0, entropy), mask=inside)
    if MAX_LOGIT >= 0:
        tl.store(out + MAX_LOGIT * out_n, m * LN2, mask=inside)
    if CONFIDENCE >= 0:
        tl.store(out + CONFIDENCE * out_n, share, mask=inside)
    if SINK >= 0:
        tl.store(out + SINK * out_n, share * f, mask=inside)
    if DISTANCE >= 0:
        tl.store(out + DISTANCE * out_n, share * d, mask=inside)
    if VISIBLE >= 0:
        tl.store(out + VISIBLE * out_n, v, mask=inside)
