# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false
"""The kernels of `top_k`, after `rows_kernel` has written the largest score of each group of keys.

The k largest scores of a row lie in the k groups with the largest maxima: each of those groups has a score that goes
before any score of another group. The same holds for groups and for runs of groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import GROUP_KEYS, LOG2E, ScoreArguments, changed, visible_cells, within

#: Neighbouring groups of which `groups_kernel` looks for the largest first.
RUN: tl.constexpr = tl.constexpr(16)


@triton.jit
def _largest(values, numbers):
    """The largest value of each row, and its number; of equal ones the smallest number."""
    best = tl.max(values, 1)
    return best, tl.min(tl.where(values == best[:, None], numbers, 0x7FFFFFFF), 1)


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "row", "count", "groups", "chosen_count"])
def groups_kernel(
    maxima, chosen, row, count, groups, chosen_count,
    L, S, low, high, stop,
    first, last, range_b, range_l,
    H: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the groups with the largest maxima, (B, H, count, chosen_count).

    It is −1 where a row sees keys of fewer groups.
    """
    tiles = tl.cdiv(count, ROWS)
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    at = tile * ROWS + tl.arange(0, ROWS)
    i, inside = row + at, at < count
    # Groups outside the keys that a row sees may not have been written.
    begin, end = i + low, tl.minimum(tl.minimum(S, stop), i + high + 1)
    if last is not None:
        place = (bh // H).to(tl.int64) * range_b + i.to(tl.int64) * range_l
        end = tl.minimum(end, within(tl.load(last + place, mask=inside, other=0), S))
        if first is not None:
            begin = tl.maximum(begin, within(tl.load(first + place, mask=inside, other=0), S))
    end = tl.where(inside, end, 0)
    line = bh.to(tl.int64) * count + at
    maxima += line[:, None, None] * groups
    begin, end = begin[:, None, None], end[:, None, None]

    run, member, slot = tl.arange(0, RUNS), tl.arange(0, RUN), tl.arange(0, SLOTS)
    group = run[None, :, None] * RUN + member[None, None, :]
    written = (group < groups) & (group * GROUP_KEYS + GROUP_KEYS > begin) & (group * GROUP_KEYS < end)
    of_runs = tl.max(tl.load(maxima + group, mask=written, other=float("-inf")), 2)
    runs = tl.zeros([ROWS, SLOTS], tl.int32) - 1
    for n in range(0, chosen_count):
        best, number = _largest(of_runs, run[None, :])
        runs = tl.where((slot == n)[None, :] & (best > float("-inf"))[:, None], number[:, None], runs)
        of_runs = tl.where(run[None, :] == number[:, None], float("-inf"), of_runs)

    group = runs[:, :, None] * RUN + member[None, None, :]
    written = (runs >= 0)[:, :, None] & (group < groups)
    written &= (group * GROUP_KEYS + GROUP_KEYS > begin) & (group * GROUP_KEYS < end)
    values = tl.load(maxima + group, mask=written, other=float("-inf"))
    values, group = tl.reshape(values, [ROWS, SLOTS * RUN]), tl.reshape(group, [ROWS, SLOTS * RUN])
    for n in range(0, chosen_count):
        best, number = _largest(values, group)
        tl.store(chosen + line * chosen_count + n, tl.where(best > float("-inf"), number, -1), mask=inside)
        values = tl.where(group == number[:, None], float("-inf"), values)


@triton.jit
def _scores_of_groups(
    q, i, b, h, args, key, k_s, chosen, chosen_count,
    SLOTS: tl.constexpr, AT_ONCE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    MATRIX: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The scores of the keys in the chosen groups for the row `i` (1,), and the numbers of the keys; (1, keys) each."""
    KEYS: tl.constexpr = AT_ONCE * GROUP_KEYS
    PARTS: tl.constexpr = SLOTS // AT_ONCE
    part, feature, of_group = tl.arange(0, PARTS), tl.arange(0, BLOCK_D), tl.arange(0, GROUP_KEYS)
    scores = tl.full([PARTS, KEYS], float("-inf"), tl.float32)
    places = tl.zeros([PARTS, KEYS], tl.int32)
    for n in range(0, PARTS):
        slot = n * AT_ONCE + tl.arange(0, AT_ONCE)
        number = tl.load(chosen + slot, mask=slot < chosen_count, other=-1)
        # A slot without a group has keys beyond the last.
        first_key = tl.where(number < 0, args.S, number * GROUP_KEYS)
        j = tl.reshape(first_key[:, None] + of_group[None, :], [KEYS])
        pointers = key + j[:, None].to(tl.int64) * k_s + feature[None, :]
        k = tl.load(pointers, mask=(j < args.S)[:, None] & (feature < D)[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        if MATRIX:
            s = tl.max(tl.dot(k, tl.broadcast_to(q[:, None], [BLOCK_D, 16]), input_precision="ieee"), 1)
        else:
            s = tl.sum(k * q[None, :], 1)
        s = changed(s, i, j, b, h, args, SOFTCAP)
        seen = visible_cells(i, j, b, h, args)
        s = tl.where(seen, s, float("-inf"))
        scores = tl.where((part == n)[:, None], s[None, :], scores)
        places = tl.where((part == n)[:, None], j[None, :], places)
    return tl.reshape(scores, [1, SLOTS * GROUP_KEYS]), tl.reshape(places, [1, SLOTS * GROUP_KEYS])


@triton.jit(do_not_specialize=["L", "S", "low", "high", "stop", "shift", "row", "count", "wanted", "chosen_count"])
def best_kernel(
    query, key, lse, chosen, weights_out, keys_out, row, count, wanted, chosen_count,
    q_b, q_h, q_l, k_b, k_h, k_s,
    L, S, low, high, stop, shift, scale, softcap,
    first, last, range_b, range_l, keys, keys_b,
    visible, visible_b, visible_h, visible_l, visible_s,
    bias, bias_b, bias_h, bias_l, bias_s,
    query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    H: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr, AT_ONCE: tl.constexpr, MATRIX: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write the `wanted` largest weights of one row and their keys, which lie in the `chosen` groups.

    Of equal ones the first key goes first. `AT_ONCE` groups are multiplied at a time, by matrix instructions if
    `MATRIX`.
    """
    args = ScoreArguments(
        L, S, low, high, stop, shift, scale, softcap, first, last, range_b, range_l, keys, keys_b,
        visible, visible_b, visible_h, visible_l, visible_s, bias, bias_b, bias_h, bias_l, bias_s,
        query_documents, key_documents, query_documents_b, key_documents_b, slopes,
    )  # fmt: skip
    at, bh = tl.program_id(0) % count, tl.program_id(0) // count
    b, h = bh // H, bh % H
    i = row + at
    query += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + i.to(tl.int64) * q_l
    key += b.to(tl.int64) * k_b + (h // PER_KV).to(tl.int64) * k_h
    chosen += (bh.to(tl.int64) * count + at) * chosen_count
    feature = tl.arange(0, BLOCK_D)
    q = tl.load(query + feature, mask=feature < D, other=0.0)
    if UPCAST:  # the interpreter multiplies the bits of bfloat16
        q = q.to(tl.float32)
    # Triton 3.9's interpreter gives `scalar & block` the wrong type.
    row_block = i + tl.zeros([1], tl.int32)
    scores, places = _scores_of_groups(
        q, row_block, b, h, args, key, k_s, chosen, chosen_count,
        SLOTS, AT_ONCE, D, BLOCK_D, MATRIX, SOFTCAP, UPCAST,
    )  # fmt: skip
    line = bh.to(tl.int64) * L + i
    row_lse = tl.load(lse + line) * LOG2E
    none = tl.zeros([1], tl.int32)
    for n in range(0, wanted):
        best, place = _largest(scores, places)
        is_key = best > float("-inf")
        tl.store(weights_out + line * wanted + n + none, tl.where(is_key, tl.exp2(best - row_lse), 0.0))
        tl.store(keys_out + line * wanted + n + none, tl.where(is_key, place, -1).to(tl.int64))
        scores = tl.where(places == place[:, None], float("-inf"), scores)
