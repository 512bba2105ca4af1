// The bias of a tile from the tables of its queries and keys, and its gradient. Both go by squares of LANES rows and keys.
// Near the diagonal the buckets of a square lie side by side, far from it all are one.
#pragma once
#include "masks.h"

namespace clearhead::ISA {

enum class Spread { one, side_by_side, any };  // of the buckets of a range of distances

INLINE Spread spread_of(const Problem& p, const BucketTable& table, int64_t low, int64_t high) {
    const int64_t rise = table.buckets[high] - table.buckets[low];
    return rise == 0 ? Spread::one : rise == high - low && !p.steep_buckets ? Spread::side_by_side : Spread::any;
}

// The numbers of LANES buckets, which rise.
INLINE Floats pick(const float* from, const int32_t* buckets) {
#if LANES == 16
    const __m512i all = _mm512_loadu_si512(buckets);
    if (buckets[LANES - 1] - buckets[0] < 2 * LANES) {
        from += buckets[0];
        const __m512i places = _mm512_sub_epi32(all, _mm512_set1_epi32(buckets[0]));
        const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + LANES);
        return reinterpret_cast<Floats>(_mm512_permutex2var_ps(low, places, high));
    }
    return reinterpret_cast<Floats>(_mm512_i32gather_ps(all, from, 4));
#else
    Floats x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = from[buckets[lane]];
    return x;
#endif
}

// Adds LANES numbers to their buckets, which rise.
INLINE void add_to_buckets([[maybe_unused]] const Problem& p, float* to, const int32_t* buckets, Floats x) {
#if LANES == 16
    if (!p.steep_buckets) {  // a bucket's sum is the difference of running sums at the ends of two buckets
        const __m512 none = _mm512_setzero_ps();
        __m512 run = reinterpret_cast<__m512>(x);
        const auto shifted = [&](auto by) __attribute__((always_inline)) {
            const __m512i low = _mm512_castps_si512(none), high = _mm512_castps_si512(run);
            return _mm512_castsi512_ps(_mm512_alignr_epi32(high, low, LANES - by()));
        };
        run = _mm512_add_ps(run, shifted(Constant<1>()));
        run = _mm512_add_ps(run, shifted(Constant<2>()));
        run = _mm512_add_ps(run, shifted(Constant<4>()));
        run = _mm512_add_ps(run, shifted(Constant<8>()));
        const __m512i here = _mm512_loadu_si512(buckets), next = _mm512_loadu_si512(buckets + 1);
        const uint32_t ends = _mm512_cmpneq_epi32_mask(here, next) | 1u << (LANES - 1);
        run = _mm512_maskz_compress_ps(static_cast<__mmask16>(ends), run);
        const __m512 sums = _mm512_sub_ps(run, shifted(Constant<1>()));
        const __mmask16 present = static_cast<__mmask16>((2u << (buckets[LANES - 1] - buckets[0])) - 1);
        float* place = to + buckets[0];
        const __m512 total = _mm512_add_ps(_mm512_maskz_loadu_ps(present, place), sums);
        _mm512_mask_storeu_ps(place, present, total);
        return;
    }
#endif
    for (int lane = 0; lane < LANES; lane++) to[buckets[lane]] += x[lane];
}

// A square of a tile: the lanes from `lane` on, whose rows are consecutive, and the keys from `key` on.
struct Square {
    int64_t row, key, rows;  // the first row and key, and the number of rows

    // Distances as a table of the queries (to later keys) and one of the keys (to later queries) counts them.
    int64_t of_query(int64_t r) const { return key - row - r; }
    int64_t of_key(int64_t j) const { return row - key - j; }
};

// Adds the numbers of the queries. square[j] holds the rows of key j. Neither this nor the next is for one bucket alone.
INLINE void add_query_numbers(const Problem& p, const Square& at, Floats (&square)[LANES]) {
    const BucketTable& table = p.query_table;
    const Spread spread = spread_of(p, table, at.of_query(LANES - 1), at.of_query(0) + LANES - 1);
    const float* from[LANES];
    for (int64_t r = 0; r < LANES; r++) from[r] = table.numbers + smaller(at.row + r, p.rows - 1) * p.table_buckets;
    Floats numbers[LANES];
    if (spread == Spread::side_by_side) {
        for (int r = 0; r < LANES; r++) from[r] += table.buckets[at.of_query(r)];
        load_transposed(from, 0, numbers);
    } else {
        for (int r = 0; r < LANES; r++) numbers[r] = pick(from[r], table.buckets + at.of_query(r));
        transpose(numbers);
    }
    UNROLL for (int j = 0; j < LANES; j++) square[j] += numbers[j];
}

INLINE void add_key_numbers(const Problem& p, const Square& at, Floats (&square)[LANES]) {
    const BucketTable& table = p.key_table;
    const Spread spread = spread_of(p, table, at.of_key(LANES - 1), at.of_key(0) + LANES - 1);
    const float* from = table.numbers + at.key * p.table_buckets;
    for (int j = 0; j < LANES; j++, from += p.table_buckets) {
        const int32_t* buckets = table.buckets + at.of_key(j);
        square[j] += spread == Spread::side_by_side ? load(from + *buckets) : pick(from, buckets);
    }
}

// Whether the rows from `row` on meet LANES keys from `key` on at distances of one bucket.
INLINE bool is_far(const Problem& p, int64_t row, int64_t rows, int64_t key) {
    const int64_t low = key - row - rows + 1, high = key - row + LANES - 1;
    if (p.query_table.numbers && spread_of(p, p.query_table, low, high) != Spread::one) return false;
    return !p.key_table.numbers || spread_of(p, p.key_table, -high, -low) == Spread::one;
}

// The numbers of the rows of a tile in one bucket.
template <int V>
struct FarNumbers {
    int32_t bucket = -1;
    Floats of_rows[V] = {};

    __attribute__((always_inline)) void read(const Problem& p, const Tile& tile, int32_t wanted) {
        if (wanted == bucket) return;
        bucket = wanted;
        for (int lane = 0; lane < V * LANES; lane++)
            of_rows[lane / LANES][lane % LANES] = p.query_table.numbers[tile.row[lane] * p.table_buckets + bucket];
    }
};

// Writes the bias of a tile for the keys [start, stop), −∞ where a bit is not set (if `bits` is not null).
template <int V>
static MaskForm tables_of_tile(const Problem& p, const Tile& tile, int64_t start, int64_t stop, const uint32_t* bits,
                               float* to) {
    FarNumbers<V> far;
    const auto write = [&](int64_t place, int v, Floats added) __attribute__((always_inline)) {
        added *= LOG2E;
        if (bits) added = hide(added, bits[v * BLOCK + place]);
        store(to + (place * V + v) * LANES, added);
    };
    for (int64_t key = start; key < stop; key += LANES) {
        const int64_t row = tile.row[0];
        if (is_far(p, row, V * LANES, key)) {
            if (p.query_table.numbers) far.read(p, tile, p.query_table.buckets[key - row]);
            const float* from = p.key_table.numbers;
            if (from) from += key * p.table_buckets + p.key_table.buckets[row - key];
            for (int64_t j = 0; j < LANES; j++) {
                const Floats of_key = from ? splat(from[j * p.table_buckets]) : Floats{};
                if (from) __builtin_prefetch(from + (j + LANES) * p.table_buckets);
                UNROLL for (int v = 0; v < V; v++) write(key - start + j, v, far.of_rows[v] + of_key);
            }
            continue;
        }
        for (int v = 0; v < V; v++) {
            Floats square[LANES] = {};
            const Square at = {row + v * LANES, key, LANES};
            if (p.query_table.numbers) add_query_numbers(p, at, square);
            if (p.key_table.numbers) add_key_numbers(p, at, square);
            UNROLL for (int j = 0; j < LANES; j++) write(key - start + j, v, square[j]);
        }
    }
    return MaskForm::numbers;
}

// Adds ds of a square to the tables of the queries.
INLINE void add_query_gradients(const Problem& p, const Square& at, Floats (&square)[LANES]) {
    const BucketTable& table = p.query_table;
    const Spread spread = spread_of(p, table, at.of_query(LANES - 1), at.of_query(0) + LANES - 1);
    float* to = table.gradient + at.row * p.table_buckets;
    transpose(square);
    for (int64_t r = 0; r < at.rows; r++, to += p.table_buckets) {
        const int32_t* buckets = table.buckets + at.of_query(r);
        if (spread == Spread::side_by_side) store(to + *buckets, load(to + *buckets) + square[r]);
        else add_to_buckets(p, to, buckets, square[r]);
    }
}

INLINE void add_key_gradients(const Problem& p, const Square& at, const Floats (&square)[LANES]) {
    const BucketTable& table = p.key_table;
    const Spread spread = spread_of(p, table, at.of_key(LANES - 1), at.of_key(0) + LANES - 1);
    float* to = table.gradient + at.key * p.table_buckets;
    if (spread == Spread::one) {
        const Floats totals = sums(square);
        for (int j = 0; j < LANES; j++, to += p.table_buckets) to[table.buckets[at.of_key(0)]] += totals[j];
        return;
    }
    for (int j = 0; j < LANES; j++, to += p.table_buckets) {
        const int32_t* buckets = table.buckets + at.of_key(j);
        if (spread == Spread::side_by_side) store(to + *buckets, load(to + *buckets) + square[j]);
        else add_to_buckets(p, to, buckets, square[j]);
    }
}

// Sums of ds of the rows of a tile in one bucket, on their way to the tables of the queries.
template <int V>
struct FarGradients {
    int32_t bucket = -1;
    Floats of_rows[V] = {};

    __attribute__((always_inline)) void flush(const Problem& p, const Tile& tile) {
        for (int64_t lane = 0; bucket >= 0 && lane < tile.count; lane++)
            p.query_table.gradient[tile.row[lane] * p.table_buckets + bucket] += of_rows[lane / LANES][lane % LANES];
        for (Floats& sum : of_rows) sum = Floats{};
    }
    __attribute__((always_inline)) void collect(const Problem& p, const Tile& tile, int32_t wanted) {
        if (wanted != bucket) flush(p, tile);
        bucket = wanted;
    }
};

// Adds ds of a tile, times a factor for each row, to the gradients of its tables.
template <int V>
static void add_to_table_gradients(const Problem& p, const Tile& tile, int64_t start, int64_t count, const float* ds,
                                   const float* factors) {
    FarGradients<V> far;
    const int64_t row = tile.row[0];
    for (int64_t j = 0; j < count; j += LANES) {
        const int64_t key = start + j;
        const bool is_one = is_far(p, row, V * LANES, key);
        if (is_one && p.query_table.gradient) far.collect(p, tile, p.query_table.buckets[key - row]);
        Floats total[LANES] = {};
        for (int v = 0; v < V; v++) {
            Floats square[LANES];
            UNROLL for (int t = 0; t < LANES; t++)
                square[t] = j + t < count ? load(ds + ((j + t) * V + v) * LANES) * load(factors + v * LANES) : Floats{};
            if (is_one) {
                UNROLL for (int t = 0; t < LANES; t++) total[t] += square[t], far.of_rows[v] += square[t];
                continue;
            }
            const Square at = {row + v * LANES, key, smaller(LANES, tile.count - v * LANES)};
            if (p.key_table.gradient) add_key_gradients(p, at, square);
            if (p.query_table.gradient) add_query_gradients(p, at, square);
        }
        if (is_one && p.key_table.gradient) add_key_gradients(p, {row, key, LANES}, total);
    }
    if (p.query_table.gradient) far.flush(p, tile);
}

// Adds ds of one score to the gradients of its tables.
INLINE void add_to_table_gradient(const Problem& p, int64_t row, int64_t key, float ds) {
    const BucketTable &of_query = p.query_table, &of_key = p.key_table;
    if (of_query.gradient) of_query.gradient[row * p.table_buckets + of_query.buckets[key - row]] += ds;
    if (of_key.gradient) of_key.gradient[key * p.table_buckets + of_key.buckets[row - key]] += ds;
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
