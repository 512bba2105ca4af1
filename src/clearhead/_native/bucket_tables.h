// The bias of a tile from the tables of its queries and keys, and its gradient. A table has a row for each bucket. Pairs of
// one distance, a diagonal of the scores, read one row of either table, whose numbers lie side by side.
#pragma once
#include "masks.h"

namespace clearhead::ISA {

constexpr int64_t APART = 8;  // diagonals of one bucket, about: they write to the same places, so that others come between

template <int DELAY, bool FALLING, int... I>
INLINE Floats some_of(Floats now, Floats before, Numbers<I...>) {
    return SHUFFLE(now, before, (((I & DELAY) != 0) == FALLING ? I : LANES + I)...);
}

// Delays lane l of a stream of vectors by l steps, or by LANES − 1 − l if FALLING. So diagonals of a square become rows, or
// rows become diagonals. `step` counts the calls.
template <bool FALLING, int DELAY = 1>
INLINE Floats skew(Floats (&earlier)[LANES - 1], int step, Floats x) {
    Floats& kept = earlier[DELAY - 1 + step % DELAY];
    const Floats before = kept;
    kept = x;
    x = some_of<DELAY, FALLING>(x, before, Lanes());
    if constexpr (2 * DELAY < LANES) return skew<FALLING, 2 * DELAY>(earlier, step, x);
    else return x;
}

// Whether the rows of a tile meet `count` keys at distances of one bucket.
INLINE bool is_far(const Problem& p, const Tile& tile, int64_t start, int64_t count) {
    const int64_t row = tile.row[0];
    return p.bucket_of[row - start - count + 1] == p.bucket_of[row + tile.vectors * LANES - 1 - start];
}

// Writes the bias of a tile for the keys [start, stop), −∞ where a bit is not set (if `bits` is not null).
template <int V>
static MaskForm tables_of_tile(const Problem& p, const Tile& tile, int64_t start, int64_t stop, const uint32_t* bits,
                               float* to) {
    const BucketTable &of_query = p.query_table, &of_key = p.key_table;
    const int64_t row = tile.row[0], count = stop - start;
    const auto write = [&](int64_t place, int v, Floats added) __attribute__((always_inline)) {
        added *= LOG2E;
        if (bits) added = hide(added, bits[v * BLOCK + place]);
        store(to + (place * V + v) * LANES, added);
    };
    if (is_far(p, tile, start, count)) {
        const int32_t bucket = p.bucket_of[row - start];
        Floats of_rows[V] = {};
        for (int v = 0; of_query.numbers && v < V; v++) of_rows[v] = load(of_query.number(bucket, row + v * LANES));
        const float* keys = of_key.numbers ? of_key.number(bucket, start) : nullptr;
        for (int64_t j = 0; j < count; j++)
            UNROLL for (int v = 0; v < V; v++) write(j, v, of_rows[v] + (keys ? keys[j] : 0));
        return MaskForm::numbers;
    }
    for (int v = 0; v < V; v++) {
        const int64_t first = row + v * LANES;
        Floats earlier[LANES - 1] = {};
        for (int64_t lead = -LANES; lead < count; lead += LANES)
            UNROLL for (int t = 0; t < LANES; t++) {
                const int64_t j = lead + t;  // of lane 0; the key of lane l is l keys later
                const int32_t bucket = p.bucket_of[first - start - j];
                Floats diagonal = {};
                if (of_query.numbers) diagonal = load(of_query.number(bucket, first));
                if (of_key.numbers) diagonal += load(of_key.number(bucket, start + j));
                const Floats added = skew<false>(earlier, t, diagonal);
                if (lead >= 0) write(j, v, added);
            }
    }
    return MaskForm::numbers;
}

// Adds ds of a tile, times a factor for each row, to the gradients of its tables.
template <int V>
static void add_to_table_gradients(const Problem& p, const Tile& tile, int64_t start, int64_t count, const float* ds,
                                   const float* factors) {
    const BucketTable &of_query = p.query_table, &of_key = p.key_table;
    const int64_t row = tile.row[0];
    const auto read = [&](int64_t j, int v) __attribute__((always_inline)) {
        return j < count ? load(ds + (j * V + v) * LANES) * load(factors + v * LANES) : Floats{};
    };
    const auto add = [](float* to, Floats x) __attribute__((always_inline)) { store(to, load(to) + x); };
    if (is_far(p, tile, start, count)) {
        const int32_t bucket = p.bucket_of[row - start];
        Floats of_rows[V] = {};
        for (int64_t j = 0; j < count; j += LANES) {
            Floats of_keys[LANES] = {};
            UNROLL for (int t = 0; t < LANES; t++)
                UNROLL for (int v = 0; v < V; v++) {
                    const Floats x = read(j + t, v);
                    of_keys[t] += x, of_rows[v] += x;
                }
            if (of_key.gradient) add(of_key.of_number(bucket, start + j), sums(of_keys));
        }
        for (int v = 0; of_query.gradient && v < V; v++) add(of_query.of_number(bucket, row + v * LANES), of_rows[v]);
        return;
    }
    for (int v = 0; v < V; v++) {
        const int64_t first = row + v * LANES;
        Floats earlier[LANES - 1] = {}, diagonals[BLOCK + LANES];
        for (int64_t base = 0; base < count + LANES; base += LANES)
            UNROLL for (int t = 0; t < LANES; t++) diagonals[base + t] = skew<true>(earlier, t, read(base + t, v));
        for (int64_t turn = 0; turn < APART; turn++)
            for (int64_t j = turn; j < count + LANES; j += APART) {
                const int64_t key = start + j - (LANES - 1);  // of lane 0
                const int32_t bucket = p.bucket_of[first - key];
                if (of_query.gradient) add(of_query.of_number(bucket, first), diagonals[j]);
                if (of_key.gradient) add(of_key.of_number(bucket, key), diagonals[j]);
            }
    }
}

// Adds ds of one score to the gradients of its tables.
INLINE void add_to_table_gradient(const Problem& p, int64_t row, int64_t key, float ds) {
    const int32_t bucket = p.bucket_of[row - key];
    if (p.query_table.gradient) *p.query_table.of_number(bucket, row) += ds;
    if (p.key_table.gradient) *p.key_table.of_number(bucket, key) += ds;
}

template <bool ALONG>
static void multiply_columns(const Multiplication& m) {
    for (int64_t d = 0, vectors; d < m.columns; d += vectors * LANES) {
        vectors = columns_at_once((m.columns - d) / LANES);
        by_vectors(vectors, [&](auto v) {
            const auto write = [&](int64_t row, int n, Floats sum) __attribute__((always_inline)) {
                float* place = m.to + row * m.to_stride + d + n * LANES;
                store(place, m.add ? load(place) + sum : sum);
            };
            const float* right = m.right + d;
            product<ALONG, v.value>(m.left, m.left_stride, right, m.right_stride, m.count, m.rows, fetch_nothing, write);
        });
    }
}

[[maybe_unused]] static void multiply_matrices(const Multiplication& m) {
    m.along ? multiply_columns<true>(m) : multiply_columns<false>(m);
}

}  // namespace clearhead::ISA
