// What forward and backward share. A tile is ROW_VECTORS vectors of query rows, which lie in the lanes, so that softmax
// needs nothing but vertical operations and neither keys nor values have to be transposed; a block is BLOCK keys.
#pragma once
#include "halves.h"
#include "philox.h"

namespace clearhead::ISA {

constexpr int TILE = LANES * ROW_VECTORS;
constexpr int BLOCK = 128;
constexpr int GROUP = 8;        // keys that one Philox counter decides about; blocks are cut at multiples of it
constexpr int KEY_STEP = 32;    // at multiples of this where pairs of bfloat16 are multiplied

INLINE int64_t step_up(int64_t x) { return round_up(x, STEP); }
INLINE int64_t lanes_up(int64_t x) { return round_up(x, LANES); }

// acc[t] += Σ_k a(t, k) · b[k]: STEP numbers times V vectors for each k, all sums in registers.
// a(t, k) is a[t·lda + k] if ALONG, else a[k·lda + t].
template <bool ALONG, int V>
INLINE void multiply(Floats (&acc)[STEP][V], const float* __restrict a, int64_t lda, const float* __restrict b,
                     int64_t ldb, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        Floats right[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) right[v] = load(b + k * ldb + v * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++) {
            const float left = ALONG ? a[t * lda + k] : a[k * lda + t];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[t][v] += left * right[v];
        }
    }
}

template <int N>
using Number = std::integral_constant<int, N>;

// work(how many vectors of rows there are, as a constant)
template <class Work>
INLINE void by_vectors(int64_t vectors, const Work& work) {
    if (vectors == 1) return work(Number<1>());
    if (vectors == 2) return work(Number<2>());
    work(Number<3>());
}

// The query rows of a tile: their heads and the columns they may see. Lanes without a row repeat the last one.
struct Rows {
    int64_t start, count, vectors;  // folded rows
    int32_t head[TILE], row[TILE], first[TILE], last[TILE];
    int64_t lowest_first, highest_first, lowest_last, highest_last;
    bool one_head;
    const float* masks;  // packed beforehand, or null
};

static void describe_rows(const Problem& p, int64_t batch, int64_t kv_head, int64_t start, int64_t stop, Rows& rows) {
    rows.start = start;
    rows.count = smaller(TILE, stop - start);
    rows.vectors = (rows.count + LANES - 1) / LANES;
    rows.masks = nullptr;
    rows.lowest_first = rows.lowest_last = INT32_MAX;
    rows.highest_first = rows.highest_last = 0;
    for (int64_t lane = 0; lane < rows.vectors * LANES; lane++) {
        const int64_t folded = start + smaller(lane, rows.count - 1), i = folded % p.rows;
        int64_t first = larger(0, i + p.low), last = smaller(p.stop, i + p.high + 1);
        if (p.first) {
            const int64_t place = batch * p.span_batch + i * p.span_row;
            first = larger(first, p.first[place]);
            last = smaller(last, p.last[place]);
        }
        last = larger(0, smaller(last, p.keys));
        first = smaller(first, last);
        rows.head[lane] = static_cast<int32_t>(kv_head * p.group() + folded / p.rows);
        rows.row[lane] = static_cast<int32_t>(i);
        rows.first[lane] = static_cast<int32_t>(first);
        rows.last[lane] = static_cast<int32_t>(last);
        if (first == last) {  // sees nothing, so it widens no range, but must be masked in every block
            rows.highest_first = INT32_MAX;
            rows.lowest_last = 0;
            continue;
        }
        rows.lowest_first = smaller(rows.lowest_first, first);
        rows.highest_first = larger(rows.highest_first, first);
        rows.lowest_last = smaller(rows.lowest_last, last);
        rows.highest_last = larger(rows.highest_last, last);
    }
    rows.one_head = rows.head[0] == rows.head[rows.count - 1];
}

// Copies rows of T into rows of floats of length `to_stride`, zeros behind their columns and below up to `padded`.
template <class T>
static void widen_rows(const T* from, int64_t from_stride, int64_t count, int64_t columns, float* to, int64_t to_stride,
                       int64_t padded) {
    for (int64_t i = 0; i < count; i++, from += from_stride, to += to_stride) {
        int64_t j = 0;
        for (; j + LANES <= columns; j += LANES) store(to + j, load_wide(from + j));
        for (; j < columns; j++) to[j] = widen(from[j]);
        for (; j < to_stride; j++) to[j] = 0;
    }
    memset(to, 0, static_cast<size_t>((padded - count) * to_stride) * sizeof(float));
}

template <class T>
INLINE void fetch(const T* from, int64_t columns) {
    for (int64_t j = 0; j < columns; j += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + j);
}

// (Inlined by force: gcc drops calls of functions that do nothing but prefetch.)
// Fetches one of `parts` equal parts of a block's keys and values, while a tile is at work on the block before.
template <class T>
INLINE void fetch_part(const Problem& p, int64_t batch, int64_t kv_head, int64_t block, int64_t part, int64_t parts) {
    const int64_t stop = smaller(block + BLOCK * (part + 1) / parts, p.keys);
    for (int64_t j = block + BLOCK * part / parts; j < stop; j++) {
        fetch(p.key.at<T>(batch, kv_head, j), p.dim);
        fetch(p.value.at<T>(batch, kv_head, j), p.value_dim);
    }
}

// Rows into lanes: the (TILE rows × columns) of a tile to (columns × V·LANES), times a factor; no row, no number.
template <class T>
static void rows_to_lanes(const View& view, const Rows& rows, int64_t batch, int64_t columns, float factor, float* to) {
    const int64_t width = rows.vectors * LANES;
    for (int64_t v = 0; v < rows.vectors; v++)
        for (int64_t j = 0; j < columns; j += LANES) {
            Floats square[LANES];
            for (int r = 0; r < LANES; r++) {
                const int64_t lane = v * LANES + r;
                square[r] = Floats{};
                if (lane < rows.count)
                    square[r] = factor * load_some(view.at<T>(batch, rows.head[lane], rows.row[lane]) + j, columns - j);
            }
            transpose(square);
            const int64_t count = smaller(LANES, columns - j);
            for (int64_t r = 0; r < count; r++) store(to + (j + r) * width + v * LANES, square[r]);
        }
}

// The reverse, each row times its factor.
template <class T>
static void lanes_to_rows(const float* from, const Rows& rows, int64_t batch, int64_t columns, const float* factors,
                          const View& view) {
    const int64_t width = rows.vectors * LANES;
    for (int64_t v = 0; v < rows.vectors; v++)
        for (int64_t j = 0; j < columns; j += LANES) {
            Floats square[LANES];
            const int64_t count = smaller(LANES, columns - j);
            for (int64_t r = 0; r < LANES; r++)
                square[r] = r < count ? load(from + (j + r) * width + v * LANES) : Floats{};
            transpose(square);
            for (int64_t r = 0; r < LANES; r++) {
                const int64_t lane = v * LANES + r;
                if (lane >= rows.count) break;
                store_some(view.at<T>(batch, rows.head[lane], rows.row[lane]) + j, square[r] * factors[lane], count);
            }
        }
}

// Which keys of a group of the whole call are kept for the rows of one vector: all ones or zero.
INLINE void group_mask(const Problem& p, const Rows& rows, int64_t batch, int v, int64_t group, Ints* kept) {
    Words counter[4] = {};
    Ints head, row;
    memcpy(&head, rows.head + v * LANES, sizeof head);
    memcpy(&row, rows.row + v * LANES, sizeof row);
    const int64_t first_stream = (p.first_item + batch) * p.all_heads + p.first_head;
    counter[0] += static_cast<uint32_t>(group);
    counter[1] = reinterpret_cast<Words>(row) + static_cast<uint32_t>(p.first_row);
    counter[2] = reinterpret_cast<Words>(head) + static_cast<uint32_t>(first_stream);
    philox(counter, p.seed);
    for (int word = 0; word < 4; word++) {
        kept[2 * word] = (counter[word] & 0xffffu) >= p.drop_below;
        kept[2 * word + 1] = (counter[word] >> 16) >= p.drop_below;
    }
}

// The same where the call begins inside a group: the end of one, and the start of the next.
static __attribute__((noinline)) void two_groups_mask(const Problem& p, const Rows& rows, int64_t batch, int v,
                                                      int64_t place, Ints* kept) {
    Ints both[2 * GROUP];
    for (int n = 0; n < 2; n++) group_mask(p, rows, batch, v, place / GROUP + n, both + n * GROUP);
    memcpy(kept, both + place % GROUP, GROUP * sizeof(Ints));
}

// Which of GROUP keys from `key` on are kept for the rows of one vector: all ones or zero.
INLINE void dropout_mask(const Problem& p, const Rows& rows, int64_t batch, int v, int64_t key, Ints (&kept)[GROUP]) {
    const int64_t place = p.first_key + key;
    if (place % GROUP == 0) return group_mask(p, rows, batch, v, place / GROUP, kept);
    two_groups_mask(p, rows, batch, v, place, kept);
}

INLINE Floats only_where(Ints kept, Floats x) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & kept); }

// The part of a block that a tile sees anything of, cut at multiples of GROUP.
INLINE void trim(const Rows& rows, int64_t& start, int64_t& stop) {
    start = larger(start, rows.lowest_first / GROUP * GROUP);
    stop = smaller(stop, round_up(rows.highest_last, GROUP));
}

}  // namespace clearhead::ISA
