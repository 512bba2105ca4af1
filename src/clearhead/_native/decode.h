// The forward pass of few queries, as in decoding. Keys and values are read once and in order, with features in the lanes.
// Threads may share the keys of a head. Each writes a partial result, and `merge` combines these.
//
// A partial result has the row maxima (in units of log 2), the sums and the unnormalised outputs of all rows. Behind them
// are the total outputs of earlier chunks.
#pragma once
#include "forward.h"

namespace clearhead::ISA {

constexpr int CHUNK = 64;  // keys whose scores are known before their values are read
constexpr int CHUNKS = 8;  // whose outputs are summed before they go to a total

static int64_t partial_size(const Problem& p) { return p.folded_rows() * (2 + 2 * lanes_up(p.value_dim)) + 16; }

[[maybe_unused]] static int64_t decode_scratch(const Problem& p) { return p.folded_rows() * lanes_up(p.dim) + 16; }

INLINE float* partial_output(const Problem& p, float* partial) { return partial + round_up(2 * p.folded_rows(), 16); }

constexpr int TOGETHER = 4;  // rows that share loads of keys and values
constexpr int BESIDE = STEP < 8 ? 2 : 4;  // keys that share loads of the queries

// Prefetch distance in bytes. Prefetches are spread, because many at once would delay the next reads.
constexpr int64_t AHEAD = 1536;

// The distance in elements from a row to the row that is prefetched with it.
template <class T>
INLINE int64_t distance(int64_t stride, int64_t columns) {
    return larger(1, AHEAD / (larger(1, columns) * static_cast<int64_t>(sizeof(T)))) * stride;
}

// The rows of keys, or values, from one on: a row's address, and the fetching of a row that is read later.
template <class T>
struct Consecutive {
    const T* first;
    int64_t stride, ahead;

    Consecutive(const T* from, int64_t step, int64_t columns) : first(from), stride(step), ahead(distance<T>(step, columns)) {}
    INLINE_METHOD const T* at(int64_t t) const { return first + t * stride; }
    INLINE_METHOD void fetch_later(int64_t t, int64_t columns) const { fetch(at(t) + ahead, columns); }
    INLINE_METHOD Consecutive from(int64_t t) const {
        Consecutive rest = *this;
        rest.first = at(t);
        return rest;
    }
};

// acc[r][k] += query r · key k over `count` columns from j on. `query` begins at column j.
template <class T, int R>
INLINE void multiply_keys(const float* query, int64_t width, const T* const (&key)[BESIDE], int64_t j, int64_t count,
                          Floats (&acc)[R][BESIDE]) {
    UNROLL for (int k = 0; k < BESIDE; k++) {
        const Floats x = load_some(key[k] + j, count);
        UNROLL for (int r = 0; r < R; r++) acc[r][k] += x * load(query + r * width);
    }
}

// dot[r] = query r · key for LANES keys. From `count` on they repeat the last key.
template <class T, template <class> class Rows, int R>
INLINE void dots(const float* query, int64_t width, const Rows<T>& keys, int64_t columns, int64_t count, Floats (&dot)[R]) {
    Floats joined[R][LANES / BESIDE];
    for (int64_t t = 0; t < LANES; t += BESIDE) {
        Floats acc[R][BESIDE] = {};
        const T* from[BESIDE];
        for (int k = 0; k < BESIDE; k++) {
            const int64_t key = smaller(t + k, count - 1);
            from[k] = keys.at(key);
            keys.fetch_later(key, columns);
        }
        int64_t j = 0;
        for (; j + LANES <= columns; j += LANES) multiply_keys<T, R>(query + j, width, from, j, LANES, acc);
        if (j < columns) multiply_keys<T, R>(query + j, width, from, j, columns - j, acc);
        for (int r = 0; r < R; r++) joined[r][t / BESIDE] = join_sums<1, BESIDE>(acc[r]);
    }
    for (int r = 0; r < R; r++) dot[r] = join_sums<BESIDE, LANES / BESIDE>(joined[r]);
}

// N vectors of the outputs of R rows, from column d on, += Σ_j weights[j] · value_j. Prefetches `fetched` columns of later rows.
// The sum begins at 0: weights that are nearly equal round each addition alike, so the errors of a longer sum add up.
template <int N, int R, class Rows>
INLINE void mix(const float (*weights)[CHUNK], const Rows& values, int64_t d, int64_t columns, int64_t count, int64_t fetched,
                float* output, int64_t width) {
    Floats acc[R][N] = {};
    for (int64_t t = 0; t < count; t++) {
        const auto* value = values.at(t) + d;
        if (fetched) values.fetch_later(t, fetched);
        UNROLL for (int v = 0; v < N; v++) {
            const Floats x = load_some(value + v * LANES, columns - v * LANES);
            UNROLL for (int r = 0; r < R; r++) acc[r][v] += weights[r][t] * x;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < N; v++) {
            float* place = output + r * width + v * LANES;
            store(place, load(place) + acc[r][v]);
        }
}

template <int R, class Rows>
static void mix_all(const float (*weights)[CHUNK], const Rows& values, int64_t columns, int64_t count, float* output,
                    int64_t width) {
    int64_t d = 0, fetched = columns;  // the first pass prefetches whole rows
    for (; columns - d >= 4 * LANES; d += 4 * LANES, fetched = 0)
        mix<4, R>(weights, values, d, 4 * LANES, count, fetched, output + d, width);
    for (; d < columns; d += LANES, fetched = 0)
        mix<1, R>(weights, values, d, columns - d, count, fetched, output + d, width);
}

// The score of a product q·k, in units of log 2.
INLINE Floats in_units_of_log2(const Problem& p, Floats dot) {
    return p.softcap != 0 ? tanh(dot * (p.scale / p.softcap)) * (p.softcap * LOG2E) : dot * (p.scale * LOG2E);
}

// Turns scores of R rows, whose largest are `best`, into weights, and adds them to the rows' maxima and totals. Calls
// rescale(row, factor) for outputs so far. Returns whether any row sees a key.
template <int R, class Rescale>
INLINE bool weigh_chunk(float (*scores)[CHUNK], const float (&best)[R], int64_t count, float* row_maxima, float* totals,
                        const Rescale& rescale) {
    bool visible = false;
    for (int r = 0; r < R; r++) {
        visible = visible || best[r] != -INFINITY;
        if (best[r] > row_maxima[r]) {
            const float factor = exp2(splat(row_maxima[r] - best[r]))[0];
            rescale(r, factor);
            totals[r] *= factor;
            row_maxima[r] = best[r];
        }
        Floats total = {};
        for (int64_t j = 0; j < count; j += LANES) {
            const Floats x = exp2(load(scores[r] + j) - row_maxima[r]);
            total += x;
            store(scores[r] + j, x);
        }
        totals[r] += sum(total);
    }
    return visible;
}

// Scores (units of log 2, −∞ where hidden) and row maxima of R rows from `first` on, for keys [start, start + count).
template <class T, int R>
static void score_chunk(const Problem& p, const Tile& tile, int64_t batch, int64_t kv_head, int64_t first,
                        int64_t start, int64_t count, const float* query, float (*scores)[CHUNK], float (&best)[R]) {
    const Consecutive<T> keys(p.key.at<T>(batch, kv_head, start), p.key.row, p.dim);
    const bool dense = p.bias.data || p.visible.data;
    Ints lane;
    for (int n = 0; n < LANES; n++) lane[n] = n;
    Floats row_maxima[R];
    for (int r = 0; r < R; r++) row_maxima[r] = splat(-INFINITY);
    for (int64_t j = 0; j < count; j += LANES) {
        const int64_t present = smaller(LANES, count - j);
        const Ints column = lane + static_cast<int32_t>(start + j);
        Floats dot[R];
        dots(query, lanes_up(p.dim), keys.from(j), p.dim, present, dot);
        for (int r = 0; r < R; r++) {
            const int64_t row = first + r;
            const int32_t last = static_cast<int32_t>(smaller(tile.last[row], start + count));
            Floats x = in_units_of_log2(p, dot[r]);
            if (dense) x = add_mask(rounded(x), mask_row(p, batch, tile.head[row], tile.row[row], start + j, present));
            x = ((column >= tile.first[row]) & (column < last)) ? x : splat(-INFINITY);
            row_maxima[r] = larger(x, row_maxima[r]);
            store(scores[r] + j, x);
        }
    }
    for (int r = 0; r < R; r++) best[r] = largest_lane(row_maxima[r]);
}

// Adds the outputs of the last chunks to the total, and stores the total as outputs if `all` chunks are done.
static void add_to_totals(const Problem& p, float* partial, bool all) {
    const int64_t floats = p.folded_rows() * lanes_up(p.value_dim);
    float *output = partial_output(p, partial), *total = output + floats;
    for (int64_t place = 0; place < floats; place += LANES) {
        const Floats sum = load(total + place) + load(output + place);
        store(total + place, sum);
        store(output + place, all ? sum : Floats{});
    }
}

// Adds the keys [start, start + count) to the partial results of R rows from `first` on.
template <class T, int R>
static void decode_chunk(const Problem& p, const Tile& tile, int64_t batch, int64_t kv_head, int64_t first,
                         int64_t start, int64_t count, const float* query, float* partial) {
    const int64_t width = lanes_up(p.value_dim);
    float *row_maxima = partial + first, *totals = row_maxima + p.folded_rows();
    float* output = partial_output(p, partial) + first * width;
    float scores[R][CHUNK], best[R];
    score_chunk<T, R>(p, tile, batch, kv_head, first, start, count, query, scores, best);
    const bool visible = weigh_chunk<R>(scores, best, count, row_maxima, totals, [&](int r, float factor) {
        for (int64_t d = 0; d < width; d += LANES) {
            float *place = output + r * width + d, *total = place + p.folded_rows() * width;
            store(place, load(place) * factor);
            store(total, load(total) * factor);
        }
    });
    const Consecutive<T> values(p.value.at<T>(batch, kv_head, start), p.value.row, p.value_dim);
    if (visible) mix_all<R>(scores, values, p.value_dim, count, output, width);
}

template <class T>
static void decode(const Problem& p, const Task& task, float* partial, float* scratch) {
    const int64_t b = task.batch, h = task.kv_head, count = p.folded_rows(), width = lanes_up(p.dim);
    Tile tile;
    describe_rows(p, b, h, 0, count, tile);
    memset(scratch, 0, static_cast<size_t>(count * width) * sizeof(float));
    memset(partial_output(p, partial), 0, static_cast<size_t>(2 * count * lanes_up(p.value_dim)) * sizeof(float));
    for (int64_t r = 0; r < count; r++) {
        partial[r] = LOWEST, partial[count + r] = 0;
        widen_rows(p.query.at<T>(b, tile.head[r], tile.row[r]), 0, 1, p.dim, scratch + r * width, width, 1);
    }
    const int64_t stop = smaller(task.key_stop, tile.highest_last);
    const int64_t first = larger(task.key_start, tile.lowest_first), run = CHUNKS * CHUNK;
    for (int64_t start = first; start < stop; start += CHUNK) {
        if (start > first && (start - first) % run == 0) add_to_totals(p, partial, false);
        const int64_t present = smaller(CHUNK, stop - start);
        int64_t r = 0;
        const auto add = [&](auto together) {
            decode_chunk<T, together>(p, tile, b, h, r, start, present, scratch + r * width, partial);
            r += together;
        };
        while (count - r >= TOGETHER) add(Constant<TOGETHER>());
        if (count - r >= 2) add(Constant<2>());
        if (count > r) add(Constant<1>());
    }
    if (stop - first > run) add_to_totals(p, partial, true);
}

// Combines the partial results of one key/value head, and writes outputs and lse.
template <class T>
static void merge(const Problem& p, int64_t batch, int64_t kv_head, float* partials, int64_t count) {
    const int64_t rows = p.folded_rows(), width = lanes_up(p.value_dim), size = partial_size(p);
    for (int64_t r = 0; r < rows; r++) {
        float top = LOWEST, total = 0;
        for (int64_t n = 0; n < count; n++) top = partials[n * size + r] > top ? partials[n * size + r] : top;
        for (int64_t n = 0; n < count; n++) {
            float& scale = partials[n * size + r];
            scale = exp2(splat(scale - top))[0];
            total += scale * partials[n * size + rows + r];
        }
        const int64_t head = kv_head * p.group() + r / p.rows, row = r % p.rows;
        const float factor = finish_row(p, batch, head, row, top, total);
        for (int64_t d = 0; d < p.value_dim; d += LANES) {
            Floats x = {};
            for (int64_t n = 0; n < count; n++)
                x += partials[n * size + r] * load(partial_output(p, partials + n * size) + r * width + d);
            if (p.wide_output)
                store_some(p.output.at<float>(batch, head, row) + d, x * factor, p.value_dim - d);
            else
                store_some(p.output.at<T>(batch, head, row) + d, x * factor, p.value_dim - d);
        }
    }
}

}  // namespace clearhead::ISA
