// How numbers become pairs of bfloat16, and how rows of tensors are packed as factors of their products.
#pragma once
#include "pairs.h"

namespace clearhead::ISA {

// The lower and the upper half of a vector of halves, alternately.
INLINE Words interleave(__m512i halves) {
    static const uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return reinterpret_cast<Words>(_mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), halves));
}

// Sixteen numbers of two rows, paired.
INLINE Words pair_up_halves(const BFloat16* x, const BFloat16* y) {
    const __m512i low = _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return interleave(_mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y)), 1));
}

constexpr uint32_t UPPER = 0xffff0000;

// Two numbers cut to bfloat16, x in the lower half of each word.
INLINE Words pair_up(Floats x, Floats y) {
    return reinterpret_cast<Words>(x) >> 16 | (reinterpret_cast<Words>(y) & UPPER);
}

// What that left out.
INLINE Floats remainder(Floats x) { return x - reinterpret_cast<Floats>(reinterpret_cast<Words>(x) & UPPER); }

// A number of sixteen bits: what it is cut to, with what that left out. What it is multiplied with is there twice.
INLINE Words split(Floats x) { return pair_up(remainder(x), x); }

// A number of eight bits, as a pair.
INLINE Words twice(Floats x) { return reinterpret_cast<Words>(x) | reinterpret_cast<Words>(x) >> 16; }

// Rows of a tile, or their negatives, into lanes, neighbouring columns paired: (pairs × V·LANES), zeros behind the last
// column.
static void rows_to_pairs(const View& view, const Tile& tile, int64_t batch, int64_t columns, int64_t pairs,
                          bool negative, Pair* to) {
    const int64_t width = tile.vectors * LANES;
    transpose_rows(width, pairs, width, to, [&](int64_t lane, int64_t pair) {
        Words word = {};
        const int64_t remaining = smaller(2 * LANES, columns - 2 * pair);
        if (lane < tile.count && remaining > 0) {
            const BFloat16* from = view.at<BFloat16>(batch, tile.head[lane], tile.row[lane]) + 2 * pair;
            memcpy(&word, from, static_cast<size_t>(remaining) * sizeof(BFloat16));
        }
        return reinterpret_cast<Floats>(negative ? word ^ 0x80008000u : word);
    });
}

// Rows of a tile, each number twice: (V·LANES × columns), zeros where there is none.
static void rows_twice(const View& view, const Tile& tile, int64_t batch, int64_t columns, Pair* to) {
    for (int64_t lane = 0; lane < tile.vectors * LANES; lane++)
        for (int64_t d = 0; d < columns; d += LANES, to += LANES) {
            Floats x = {};
            if (lane < tile.count)
                x = load_some(view.at<BFloat16>(batch, tile.head[lane], tile.row[lane]) + d, columns - d);
            const Words pairs = twice(x);
            memcpy(to, &pairs, sizeof pairs);
        }
}

// Rows as they are, each padded with zeros to whole pairs, and rows of zeros up to `padded`.
static void copy_pairs(const View& view, int64_t batch, int64_t head, int64_t start, int64_t count, int64_t columns,
                       int64_t pairs, int64_t padded, Pair* to) {
    const size_t bytes = static_cast<size_t>(columns) * sizeof(BFloat16);
    for (int64_t i = 0; i < count; i++, to += pairs) {
        memcpy(to, view.at<BFloat16>(batch, head, start + i), bytes);
        memset(reinterpret_cast<char*>(to) + bytes, 0, static_cast<size_t>(pairs) * sizeof(Pair) - bytes);
    }
    memset(to, 0, static_cast<size_t>((padded - count) * pairs) * sizeof(Pair));
}

INLINE int64_t pairs_up(int64_t columns) { return round_up((columns + 1) / 2, PAIRS_AT_ONCE); }
INLINE int64_t height_up(int64_t columns) { return round_up(columns, ROWS_AT_ONCE); }

// Rows as pairs, in place if their layout allows, else copied to `buffer`.
static Matrix<const Pair> find_pairs(const View& view, int64_t batch, int64_t head, int64_t start, int64_t count,
                                     int64_t columns, int64_t padded, Pair* buffer) {
    const int64_t pairs = pairs_up(columns);
    const BFloat16* from = view.at<BFloat16>(batch, head, start);
    const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(Pair) == 0, dense = view.row == columns;
    if (aligned && dense && columns == 2 * pairs && count == padded) return {reinterpret_cast<const Pair*>(from), pairs};
    copy_pairs(view, batch, head, start, count, columns, pairs, padded, buffer);
    return {buffer, pairs};
}

// Rows into columns, each number twice: (columns, rounded up to `height`, × stride pairs), zeros where there is none.
static void transpose_twice(const View& view, int64_t batch, int64_t head, int64_t start, int64_t count,
                            int64_t columns, int64_t height, int64_t stride, int64_t padded, Pair* to) {
    transpose_rows(padded, height, stride, to, [&](int64_t i, int64_t d) {
        if (i >= count || d >= columns) return Floats{};
        return reinterpret_cast<Floats>(twice(load_some(view.at<BFloat16>(batch, head, start + i) + d, columns - d)));
    });
}

// The columns d … d + 15 of rows i and i + 1, paired; zeros where there is no such row or column.
INLINE Floats pair_rows(const View& view, int64_t batch, int64_t head, int64_t start, int64_t i, int64_t count,
                        int64_t d, int64_t columns) {
    const BFloat16* from = view.at<BFloat16>(batch, head, start + i) + d;
    if (i + 2 <= count && d + LANES <= columns) return reinterpret_cast<Floats>(pair_up_halves(from, from + view.row));
    Floats low = {}, high = {};
    if (i < count && d < columns) low = load_some(from, columns - d);
    if (i + 1 < count && d < columns) high = load_some(from + view.row, columns - d);
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(low) >> 16 | reinterpret_cast<Words>(high));
}

// Rows into columns, neighbouring rows paired: (columns, rounded up to `height`, × stride pairs).
static void transpose_pairs(const View& view, int64_t batch, int64_t head, int64_t start, int64_t count,
                            int64_t columns, int64_t height, int64_t stride, int64_t padded, Pair* to) {
    transpose_rows(padded / 2, height, stride, to, [&](int64_t pair, int64_t d) {
        return pair_rows(view, batch, head, start, 2 * pair, count, d, columns);
    });
}

}  // namespace clearhead::ISA
