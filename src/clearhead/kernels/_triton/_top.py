# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false
"""The kernels of `top_k`: the largest score of each group of keys, and the best keys of the best groups."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import LOG2E, changed, load_rows, products, visible_cells, visited, within

GROUP_KEYS: tl.constexpr = tl.constexpr(16)


@triton.jit
def _over_tiles(
    out, q, start, end, i, b, h, L, S, low, high, stop, shift, scale, softcap,
    key, k_s, written, groups,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, PLAIN: tl.constexpr, HIDES: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the largest score of each row and group of the keys start … end."""
    for begin in tl.range(start, end, N, num_stages=STAGES):
        s = products(q, load_rows(key, begin, S, k_s, D, N, BLOCK_D, HIDES), UPCAST)
        j = begin + tl.arange(0, N)
        factor = scale * LOG2E
        if not PLAIN:
            s = changed(
                s, i[:, None], j[None, :], b, h, L, S, shift, scale, softcap,
                bias, bias_b, bias_h, bias_l, bias_s, slopes, SOFTCAP,
            )  # fmt: skip
            factor = 1.0
        if HIDES:
            seen = visible_cells(
                i[:, None], j[None, :], b, h, L, S, low, high, stop,
                first, last, range_b, range_l, keys, keys_b,
                visible, visible_b, visible_h, visible_l, visible_s,
                query_documents, key_documents, query_documents_b, key_documents_b,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        largest = tl.max(tl.reshape(s, [M, N // GROUP_KEYS, GROUP_KEYS]), 2) * factor  # (rows, groups)
        group = begin // GROUP_KEYS + tl.arange(0, N // GROUP_KEYS)
        tl.store(out[:, None] + group[None, :], largest, mask=written[:, None] & (group < groups)[None, :])


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift", "row", "count", "groups", "splits"])
def largest_kernel(
    query, key, out, row, count, groups, splits,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the largest score, times log2 e, of the rows row … row + count and each group of keys.

    `out` is (B, H, count, groups). Groups of tiles that none of a tile's rows sees are not written. The keys of a tile
    of rows are divided among `splits` programs.
    """
    tiles = tl.cdiv(count, M)
    program = tl.program_id(0)
    split, tile, bh = program % splits, program // splits % tiles, program // splits // tiles
    b, h = bh // H, bh % H
    i0 = row + tile * M
    i1 = tl.minimum(i0 + M, row + count) - 1
    i = i0 + tl.arange(0, M)
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    key += b.to(tl.int64) * k_b + (h // GROUP).to(tl.int64) * k_h
    out += (bh.to(tl.int64) * count + (i - row)) * groups
    q = load_rows(query, i0, L, q_l, D, M, BLOCK_D, True)

    begin, end = visited(i, i0, i1, b, S, low, high, stop, first, last, range_b, range_l, N)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), N), splits) * N
    begin += split * share
    end = tl.minimum(end, begin + share)
    # The keys of that share that every row sees.
    whole, whole_end = tl.maximum(0, i1 + low), tl.minimum(tl.minimum(S, stop), i0 + high + 1)
    if last is not None:
        place = b.to(tl.int64) * range_b + tl.minimum(i, i1).to(tl.int64) * range_l
        whole_end = tl.minimum(whole_end, tl.min(within(tl.load(last + place), S), 0))
        if first is not None:
            whole = tl.maximum(whole, tl.max(within(tl.load(first + place), S), 0))
    whole = tl.maximum(tl.cdiv(whole, N) * N, begin)
    whole_end = tl.minimum(tl.maximum(whole_end, 0) // N * N, begin + share)
    PLAIN: tl.constexpr = (not SOFTCAP) and (bias is None) and (slopes is None)
    NEVER_WHOLE: tl.constexpr = (
        (keys is not None) or (visible is not None) or (bias is not None) or (query_documents is not None)
    )
    if NEVER_WHOLE:
        whole, whole_end = end, end
    if whole_end <= whole:
        whole, whole_end = end, end
    written = i <= i1
    _over_tiles(
        out, q, begin, whole, i, b, h, L, S, low, high, stop, shift, scale, softcap, key, k_s, written, groups,
        first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
        query_documents, key_documents, query_documents_b, key_documents_b, slopes,
        D, BLOCK_D, M, N, SOFTCAP, PLAIN, True, UPCAST, STAGES,
    )  # fmt: skip
    if not NEVER_WHOLE:
        _over_tiles(
            out, q, whole, whole_end, i, b, h, L, S, low, high, stop, shift, scale, softcap, key, k_s, written, groups,
            first, last, range_b, range_l, keys, keys_b,
            visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
            query_documents, key_documents, query_documents_b, key_documents_b, slopes,
            D, BLOCK_D, M, N, SOFTCAP, PLAIN, False, UPCAST, STAGES,
        )  # fmt: skip
        _over_tiles(
            out, q, whole_end, end, i, b, h, L, S, low, high, stop, shift, scale, softcap, key, k_s, written, groups,
            first, last, range_b, range_l, keys, keys_b,
            visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
            query_documents, key_documents, query_documents_b, key_documents_b, slopes,
            D, BLOCK_D, M, N, SOFTCAP, PLAIN, True, UPCAST, STAGES,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["L", "S", "low", "high", "stop", "shift", "row", "count", "groups", "wanted", "chosen_count"]
)
def best_kernel(
    query, key, lse, largest, weights_out, keys_out, row, count, groups, wanted, chosen_count,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the `wanted` largest weights of one row and their keys, from `largest` of `largest_kernel`.

    They lie in the `chosen_count` groups with the largest maxima. Of equal ones the first key goes first.
    """
    at, bh = tl.program_id(0) % count, tl.program_id(0) // count
    b, h = bh // H, bh % H
    i = row + at
    i0 = row + at // M * M
    i1 = tl.minimum(i0 + M, row + count) - 1
    begin, end = visited(i0 + tl.arange(0, M), i0, i1, b, S, low, high, stop, first, last, range_b, range_l, N)
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + i.to(tl.int64) * q_l
    key += b.to(tl.int64) * k_b + (h // GROUP).to(tl.int64) * k_h

    group, slot = tl.arange(0, BLOCK_GROUPS), tl.arange(0, SLOTS)
    written = (group >= begin // GROUP_KEYS) & (group < tl.cdiv(end, N) * (N // GROUP_KEYS)) & (group < groups)
    largest += (bh.to(tl.int64) * count + at) * groups
    maxima = tl.load(largest + group, mask=written, other=float("-inf"))
    chosen = tl.full([SLOTS], -1, tl.int32)
    for n in range(0, chosen_count):
        best = tl.max(maxima, 0)
        place = tl.min(tl.where(maxima == best, group, BLOCK_GROUPS), 0)
        chosen = tl.where(slot == n, tl.where(best > float("-inf"), place, -1), chosen)
        maxima = tl.where(group == place, float("-inf"), maxima)

    feature, of_group = tl.arange(0, BLOCK_D), tl.arange(0, GROUP_KEYS)
    q = tl.load(query + feature, mask=feature < D, other=0.0).to(tl.float32)
    scores = tl.full([SLOTS, GROUP_KEYS], float("-inf"), tl.float32)
    # Triton 3.9's interpreter gives `scalar & block` the wrong type.
    row_block = i + tl.zeros([1], tl.int32)
    for n in range(0, chosen_count):
        number = tl.max(tl.where(slot == n, chosen, -1), 0)
        start = tl.maximum(number, 0) * GROUP_KEYS
        j = start + of_group
        s = tl.sum(load_rows(key, start, S, k_s, D, GROUP_KEYS, BLOCK_D, True).to(tl.float32) * q[None, :], 1)
        s = changed(
            s, row_block, j, b, h, L, S, shift, scale, softcap, bias, bias_b, bias_h, bias_l, bias_s, slopes, SOFTCAP
        )  # fmt: skip
        seen = visible_cells(
            row_block, j, b, h, L, S, low, high, stop,
            first, last, range_b, range_l, keys, keys_b,
            visible, visible_b, visible_h, visible_l, visible_s,
            query_documents, key_documents, query_documents_b, key_documents_b,
        )  # fmt: skip
        s = tl.where(seen, s, float("-inf"))
        s = tl.where(number >= 0, s, float("-inf"))
        scores = tl.where((slot == n)[:, None], s[None, :], scores)

    scores = tl.reshape(scores, [SLOTS * GROUP_KEYS])
    j = tl.reshape(chosen[:, None] * GROUP_KEYS + of_group[None, :], [SLOTS * GROUP_KEYS])
    line = bh.to(tl.int64) * L + i
    row_lse = tl.load(lse + line) * LOG2E
    for n in range(0, wanted):
        best = tl.max(scores, 0)
        place = tl.min(tl.where(scores == best, j, 0x7FFFFFFF), 0)
        found = best > float("-inf")
        tl.store(weights_out + line * wanted + n, tl.where(found, tl.exp2(best - row_lse), 0.0))
        tl.store(keys_out + line * wanted + n, tl.where(found, place, -1).to(tl.int64))
        scores = tl.where(j == place, float("-inf"), scores)
