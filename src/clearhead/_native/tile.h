// Common parts of forward and backward pass. A tile is ROW_VECTORS vectors of query rows, which lie in the lanes. Softmax
// then needs only vertical operations, and keys and values are not transposed. A block is BLOCK keys.
#pragma once
#include "halves.h"
#include "philox.h"

namespace clearhead::ISA {

constexpr int TILE = LANES * ROW_VECTORS;
constexpr int BLOCK = 128;
constexpr int OCTET = 8;        // keys with one Philox counter, and one row maximum in panels; blocks are cut at multiples
constexpr int KEY_STEP = 32;    // the same for products of pairs of bfloat16

INLINE int64_t step_up(int64_t x) { return round_up(x, STEP); }
INLINE int64_t lanes_up(int64_t x) { return round_up(x, LANES); }

// The number of vectors of columns, of `vectors`, that are summed in registers together.
INLINE int64_t columns_at_once(int64_t vectors) { return vectors >= 3 && vectors != 4 ? 3 : smaller(vectors, 2); }

// acc[t] += Σ_k a(t, k) · b[k]: STEP numbers times V vectors for each k, all sums in registers.
// a(t, k) is a[t·lda + k] if ALONG, else a[k·lda + t].
template <bool ALONG, int V>
INLINE void multiply(Floats (&acc)[STEP][V], const float* __restrict a, int64_t lda, const float* __restrict b,
                     int64_t ldb, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        Floats right[V];
        UNROLL for (int v = 0; v < V; v++) right[v] = load(b + k * ldb + v * LANES);
        UNROLL for (int t = 0; t < STEP; t++) {
            const float left = ALONG ? a[t * lda + k] : a[k * lda + t];
            UNROLL for (int v = 0; v < V; v++) acc[t][v] += left * right[v];
        }
    }
}

// Calls write(row, vector, sum) for the product left (rows × count) · right (count × V·LANES), and before each step
// between(row, STEP, rows). Numbers of a row of `left` lie side by side if ALONG, else `left_stride` apart.
template <bool ALONG, int V, class Between, class Write>
INLINE void product(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t count,
                    int64_t rows, const Between& between, const Write& write) {
    for (int64_t row = 0; row < rows; row += STEP) {
        between(row, STEP, rows);
        Floats acc[STEP][V] = {};
        multiply<ALONG>(acc, ALONG ? left + row * left_stride : left + row, left_stride, right, right_stride, count);
        UNROLL for (int t = 0; t < STEP; t++)
            UNROLL for (int v = 0; v < V; v++) write(row + t, v, acc[t][v]);
    }
}
constexpr auto fetch_nothing = [](int64_t, int64_t, int64_t) {};

// Adds sums to rows of vectors that lie `stride` apart.
INLINE auto add_to(float* to, int64_t stride) {
    return [=](int64_t row, int v, Floats sum) __attribute__((always_inline)) {
        float* place = to + row * stride + v * LANES;
        store(place, load(place) + sum);
    };
}

template <auto X>
using Constant = std::integral_constant<decltype(X), X>;

// Calls work(number of vectors of rows, as a constant).
template <class Work>
INLINE void by_vectors(int64_t vectors, const Work& work) {
    if (vectors == 1) return work(Constant<1>());
    if (vectors == 2) return work(Constant<2>());
    work(Constant<3>());
}

// Some query rows, with their heads and ranges of columns. Lanes without a row repeat the last row.
struct Tile {
    int64_t count, vectors;  // of folded rows
    int32_t head[TILE], row[TILE], first[TILE], last[TILE];
    int64_t lowest_first, highest_first, lowest_last, highest_last;
    bool one_head;
    const float* masks;  // packed masks, or null
};

static void describe_rows(const Problem& p, int64_t batch, int64_t kv_head, int64_t start, int64_t stop, Tile& tile) {
    tile.count = smaller(TILE, stop - start);
    tile.vectors = divide_up(tile.count, LANES);
    tile.masks = nullptr;
    tile.lowest_first = tile.lowest_last = INT32_MAX;
    tile.highest_first = tile.highest_last = 0;
    for (int64_t lane = 0; lane < tile.vectors * LANES; lane++) {
        const int64_t folded = start + smaller(lane, tile.count - 1), i = folded % p.rows;
        const auto [first, last] = p.range(batch, i);
        tile.head[lane] = static_cast<int32_t>(kv_head * p.group() + folded / p.rows);
        tile.row[lane] = static_cast<int32_t>(i);
        tile.first[lane] = static_cast<int32_t>(first);
        tile.last[lane] = static_cast<int32_t>(last);
        if (first == last) {  // fully masked: widens no range, but must be masked in every block
            tile.highest_first = INT32_MAX;
            tile.lowest_last = 0;
            continue;
        }
        tile.lowest_first = smaller(tile.lowest_first, first);
        tile.highest_first = larger(tile.highest_first, first);
        tile.lowest_last = smaller(tile.lowest_last, last);
        tile.highest_last = larger(tile.highest_last, last);
    }
    tile.one_head = tile.head[0] == tile.head[tile.count - 1];
}

// All keys that rows of some tiles may see.
template <class SomeTile>
static KeyRange visible_keys(const Problem& p, const SomeTile* tiles, int64_t count) {
    KeyRange range = {p.keys, 0};
    for (int64_t n = 0; n < count; n++) {
        range.start = smaller(range.start, tiles[n].lowest_first);
        range.stop = larger(range.stop, tiles[n].highest_last);
    }
    return range;
}

// Copies rows of T into rows of floats of length `to_stride`, padded with zeros to this length and to `padded` rows.
template <class T>
static void widen_rows(const T* from, int64_t from_stride, int64_t count, int64_t columns, float* to, int64_t to_stride,
                       int64_t padded) {
    for (int64_t i = 0; i < count; i++, from += from_stride, to += to_stride) {
        int64_t j = 0;
        for (; j + LANES <= columns; j += LANES) store(to + j, load_wide(from + j));
        if (j < columns) store_some(to + j, load_some(from + j, columns - j), to_stride - j);
    }
    memset(to, 0, static_cast<size_t>((padded - count) * to_stride) * sizeof(float));
}

template <class T>
INLINE void fetch(const T* from, int64_t columns) {
    for (int64_t j = 0; j < columns; j += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + j);
}

// Prefetches one of `slices` equal slices of a block's keys and values, while a tile works on the previous block.
// (Forced inline: gcc drops calls of functions that only prefetch.)
template <class T>
INLINE void fetch_slice(const Problem& p, int64_t batch, int64_t kv_head, int64_t block, int64_t slice, int64_t slices) {
    const int64_t stop = smaller(block + BLOCK * (slice + 1) / slices, p.keys);
    for (int64_t j = block + BLOCK * slice / slices; j < stop; j++) {
        fetch(p.key.at<T>(batch, kv_head, j), p.dim);
        fetch(p.value.at<T>(batch, kv_head, j), p.value_dim);
    }
}

// Transposes rows into columns `stride` apart. vector(row, column) returns LANES numbers of a row from a column on.
template <class T, class Vector>
INLINE void transpose_rows(int64_t rows, int64_t columns, int64_t stride, T* to, const Vector& vector) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            Floats square[LANES];
            for (int r = 0; r < LANES; r++) square[r] = vector(i + r, j);
            transpose(square);
            for (int64_t r = 0; r < smaller(LANES, columns - j); r++)
                memcpy(to + (j + r) * stride + i, &square[r], sizeof(Floats));
        }
}

// Transposes a square of numbers whose rows begin at from[0 … LANES − 1].
INLINE void load_transposed(const float* const (&from)[LANES], int64_t j, Floats (&square)[LANES]) {
#if LANES == 16
    UNROLL for (int q = 0; q < LANES; q += 4) {  // quarters of rows go straight to their lanes: half as many shuffles
        __m512 x[4];
        UNROLL for (int k = 0; k < 4; k++) {
            x[k] = _mm512_castps128_ps512(_mm_loadu_ps(from[k] + j + q));
            x[k] = _mm512_insertf32x4(x[k], _mm_loadu_ps(from[4 + k] + j + q), 1);
            x[k] = _mm512_insertf32x4(x[k], _mm_loadu_ps(from[8 + k] + j + q), 2);
            x[k] = _mm512_insertf32x4(x[k], _mm_loadu_ps(from[12 + k] + j + q), 3);
        }
        const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
        const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
        const __m512d low2 = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
        const __m512d high2 = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
        square[q] = reinterpret_cast<Floats>(_mm512_unpacklo_pd(low, low2));
        square[q + 1] = reinterpret_cast<Floats>(_mm512_unpackhi_pd(low, low2));
        square[q + 2] = reinterpret_cast<Floats>(_mm512_unpacklo_pd(high, high2));
        square[q + 3] = reinterpret_cast<Floats>(_mm512_unpackhi_pd(high, high2));
    }
#else
    for (int r = 0; r < LANES; r++) square[r] = load(from[r] + j);
    transpose(square);
#endif
}

// Transposes the rows of a tile to (columns × V·LANES), times a factor, with zeros in lanes without a row.
template <class T>
static void rows_to_lanes(const View& view, const Tile& tile, int64_t batch, int64_t columns, float factor, float* to) {
    const int64_t width = tile.vectors * LANES;
    transpose_rows(width, columns, width, to, [&](int64_t lane, int64_t j) {
        if (lane >= tile.count) return Floats{};
        return factor * load_some(view.at<T>(batch, tile.head[lane], tile.row[lane]) + j, columns - j);
    });
}

// The reverse. Calls write(lane, j, vector, count) for `count` numbers of a row from column j on.
template <class Write>
INLINE void each_row_vector(const float* from, const Tile& tile, int64_t columns, const Write& write) {
    const int64_t width = tile.vectors * LANES;
    for (int64_t first = 0; first < width; first += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            Floats square[LANES];
            const int64_t count = smaller(LANES, columns - j);
            for (int64_t r = 0; r < LANES; r++)
                square[r] = r < count ? load(from + (j + r) * width + first) : Floats{};
            transpose(square);
            for (int64_t lane = first; lane < smaller(tile.count, first + LANES); lane++)
                write(lane, j, square[lane - first], count);
        }
}

// Writes the columns of a tile as rows, each times its factor.
template <class T>
static void lanes_to_rows(const float* from, const Tile& tile, int64_t batch, int64_t columns, const float* factors,
                          const View& view) {
    each_row_vector(from, tile, columns, [&](int64_t lane, int64_t j, Floats x, int64_t count) {
        store_some(view.at<T>(batch, tile.head[lane], tile.row[lane]) + j, x * factors[lane], count);
    });
}

// The dropout mask of an octet of keys for the rows of one vector: all ones for undropped weights, or zero.
INLINE void octet_mask(const Problem& p, const Tile& tile, int64_t batch, int v, int64_t octet, Ints* undropped) {
    Words counter[4] = {};
    Ints head, row;
    memcpy(&head, tile.head + v * LANES, sizeof head);
    memcpy(&row, tile.row + v * LANES, sizeof row);
    const int64_t first_stream = (p.offset.item + batch) * p.offset.num_heads + p.offset.head;
    counter[0] += static_cast<uint32_t>(octet);
    counter[1] = reinterpret_cast<Words>(row) + static_cast<uint32_t>(p.offset.row);
    counter[2] = reinterpret_cast<Words>(head) + static_cast<uint32_t>(first_stream);
    philox(counter, p.seed);
    for (int word = 0; word < 4; word++) {
        undropped[2 * word] = (counter[word] & 0xffffu) >= p.drop_below;
        undropped[2 * word + 1] = (counter[word] >> 16) >= p.drop_below;
    }
}

// The same for a call that begins inside an octet: the end of one octet and the start of the next.
static __attribute__((noinline)) void two_octets_mask(const Problem& p, const Tile& tile, int64_t batch, int v,
                                                      int64_t place, Ints* undropped) {
    Ints both[2 * OCTET];
    for (int n = 0; n < 2; n++) octet_mask(p, tile, batch, v, place / OCTET + n, both + n * OCTET);
    memcpy(undropped, both + place % OCTET, OCTET * sizeof(Ints));
}

// The dropout mask of the OCTET keys from `key` on for the rows of one vector.
INLINE void dropout_mask(const Problem& p, const Tile& tile, int64_t batch, int v, int64_t key, Ints (&undropped)[OCTET]) {
    const int64_t place = p.offset.column + key;
    if (place % OCTET == 0) return octet_mask(p, tile, batch, v, place / OCTET, undropped);
    two_octets_mask(p, tile, batch, v, place, undropped);
}

INLINE Floats only_where(Ints undropped, Floats x) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & undropped); }

// Cuts a block to the visible range of a tile, at multiples of OCTET.
INLINE void trim(const Tile& tile, int64_t& start, int64_t& stop) {
    start = larger(start, tile.lowest_first / OCTET * OCTET);
    stop = smaller(stop, round_up(tile.highest_last, OCTET));
}

}  // namespace clearhead::ISA
