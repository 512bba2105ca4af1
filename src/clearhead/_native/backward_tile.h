// A tile of the backward pass: its prepared rows, and the conversion of its sums to gradients.
#pragma once
#include "forward.h"

namespace clearhead::ISA {

constexpr float HEAVY_WEIGHT = 0.51f;  // above one half, so that rounding cannot make two keys of a row heavy

// A tile with its numbers from the forward pass and its dq. (D) and (Dv) are padded to whole vectors or steps.
struct BackwardTile : SummedTile {
    float *query_lanes, *gradient_lanes;  // (D × V·LANES), (Dv × V·LANES), or their pairs
    float *query_rows, *gradient_rows;    // (V·LANES × D), (V·LANES × Dv), or pairs of each number twice
    float lse[TILE], correction[TILE];    // lse in units of log 2, rounded; δ − dl
    float missing[TILE];                  // the factor of the weights that corrects this rounding
    bool misses;                          // of products of pairs: whether it is more than the rounding of weights
    float* few_queries;                   // the queries as decoding reads them, if `few`
    float heavy_above[TILE];              // the weight above which a key is heavy
    int32_t heavy_key[TILE];              // the heavy key, or −1
    float heavy_slope[TILE];              // the slope of the soft-cap at its score
    double light_sum[TILE];               // the sum of ds of all other keys
};

static int64_t tile_floats(const Problem& p) {
    return TILE * (3 * step_up(p.dim) + p.value_dim + 2 * lanes_up(p.dim) + lanes_up(p.value_dim)) + 7 * 16;
}

// dk (S × D), then dv (S × Dv), columns padded to whole vectors.
static int64_t keys_summed(const Problem& p) { return round_up(p.keys, KEY_STEP); }
static int64_t sums_size(const Problem& p) { return keys_summed(p) * (lanes_up(p.dim) + lanes_up(p.value_dim)); }

// Copies the rows of a tile, times a factor and perhaps a factor per row, with zeros for lanes without a row.
template <class T>
static void copy_rows(const View& view, const Tile& tile, int64_t batch, int64_t columns, float factor,
                      const float* factors, float* to) {
    const int64_t stride = lanes_up(columns);
    for (int64_t lane = 0; lane < tile.vectors * LANES; lane++, to += stride) {
        if (lane >= tile.count) {
            clear(to, stride);
            continue;
        }
        const T* from = view.at<T>(batch, tile.head[lane], tile.row[lane]);
        const float of_row = factors ? factor * factors[lane] : factor;
        for (int64_t j = 0; j < columns; j += LANES) store(to + j, of_row * load_some(from + j, columns - j));
    }
}

// A dot product in float64. dp − δ cancels, and the error of δ is the same for all keys.
template <class T>
INLINE double dot(const float* x, const T* y, int64_t count) {
    Doubles total = {};
    for (int64_t j = 0; j < count; j += LANES) {
        const Floats both[2] = {load_some(x + j, count - j), load_some(y + j, count - j)};
        HalfFloats halves[4];
        memcpy(halves, both, sizeof both);
        for (int n = 0; n < 2; n++)
            total += __builtin_convertvector(halves[n], Doubles) * __builtin_convertvector(halves[n + 2], Doubles);
    }
    for (int half = LANES / 4; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) total[lane] += total[lane + half];
    return total[0];
}

template <class T>
static void correct(const Problem& p, int64_t batch, BackwardTile& tile) {
    for (int64_t lane = 0; lane < TILE; lane++) {
        tile.lse[lane] = -LOWEST;  // a lane without a row has weights of zero
        tile.correction[lane] = tile.missing[lane] = 0;
        if (lane >= tile.count) continue;
        const int64_t place = p.row_place(batch, tile.head[lane], tile.row[lane]);
        const float* output = p.exact_output.at<float>(batch, tile.head[lane], tile.row[lane]);
        const T* gradient = p.output_gradient.at<T>(batch, tile.head[lane], tile.row[lane]);
        const double delta = dot(output, gradient, p.value_dim);
        tile.correction[lane] = static_cast<float>(delta - (p.lse_gradient ? p.lse_gradient[place] : 0));
        // A row whose every score is the lowest number has the lowest lse. Its weights cannot be recomputed and are 0 here.
        const double exact = p.lse[place] * LOG2_OF_E;
        const bool usual = p.lse[place] != -INFINITY && p.lse[place] != LOWEST;
        tile.lse[lane] = usual ? static_cast<float>(exact) : p.lse[place] == LOWEST ? -LOWEST : 0;
        if (usual) tile.missing[lane] = static_cast<float>(tile.lse[lane] - exact);
        p.correction[place] = tile.correction[lane];
    }
    for (int lane = 0; lane < TILE; lane += LANES) store(tile.missing + lane, exp2(load(tile.missing + lane)));
}

// Adds the sums of a run to the total, and begins the next with zeros.
static void end_run(BackwardTile& tile) {
    for (int64_t place = 0; place < tile.floats; place += LANES)
        store(tile.total + place, load(tile.total + place) + load(tile.sums + place));
    clear(tile.sums, tile.floats);
    tile.summed = 0;
}

// Writes dq of a tile, each row times its factor.
template <class T>
static void write_query_gradient(const Problem& p, int64_t batch, BackwardTile& tile, const float* factors) {
    if (tile.total) end_run(tile);
    lanes_to_rows<T>(tile.total ? tile.total : tile.sums, tile, batch, p.dim, factors, p.query_gradient);
}

template <class T>
static void prepare(const Problem& p, int64_t batch, BackwardTile& tile, float*& scratch) {
    const int64_t lanes = tile.vectors * LANES;
    tile.query_lanes = take(scratch, p.dim * lanes);
    tile.gradient_lanes = take(scratch, p.value_dim * lanes);
    tile.query_rows = take(scratch, lanes_up(p.dim) * lanes);
    tile.gradient_rows = take(scratch, lanes_up(p.value_dim) * lanes);
    begin_sums(tile, step_up(p.dim), has_totals(p), scratch);
    correct<T>(p, batch, tile);
    for (int lane = 0; lane < TILE; lane++) {
        tile.heavy_above[lane] = p.whole_rows ? HEAVY_WEIGHT / tile.missing[lane] : INFINITY;
        tile.heavy_key[lane] = -1, tile.heavy_slope[lane] = 1, tile.light_sum[lane] = 0;
    }
    rows_to_lanes<T>(p.query, tile, batch, p.dim, 1, tile.query_lanes);
    rows_to_lanes<T>(p.output_gradient, tile, batch, p.value_dim, p.kept_factor, tile.gradient_lanes);
    copy_rows<T>(p.query, tile, batch, p.dim, 1, tile.missing, tile.query_rows);
    if (p.few) {
        tile.few_queries = take(scratch, lanes_up(p.dim) * lanes);
        copy_rows<T>(p.query, tile, batch, p.dim, 1, nullptr, tile.few_queries);
    }
    copy_rows<T>(p.output_gradient, tile, batch, p.value_dim, p.kept_factor, tile.missing, tile.gradient_rows);
}

// to += factor · from
INLINE void add_row(const float* from, float factor, int64_t count, float* to) {
    for (int64_t j = 0; j < count; j += LANES)
        store_some(to + j, load_some(to + j, count - j) + factor * load_some(from + j, count - j), count - j);
}

// Adds ds of the heavy keys to the gradients, after dq is written.
static void add_heavy_keys(const Problem& p, const BackwardTile& tile, int64_t batch, int64_t kv_head, float* key_sums) {
    for (int64_t lane = 0; lane < tile.count; lane++) {
        const int64_t head = tile.head[lane], row = tile.row[lane], key = tile.heavy_key[lane];
        if (p.heavy_keys)
            p.heavy_keys[p.row_place(batch, head, row)] = {tile.light_sum[lane] * tile.missing[lane], key,
                                                           tile.heavy_slope[lane]};
        if (p.heavy_keys || key < 0) continue;
        const double ds = p.sum_of_score_gradients(batch, head, row) - tile.light_sum[lane] * tile.missing[lane];
        const float of_bias = static_cast<float>(ds), of_product = of_bias * tile.heavy_slope[lane];
        if (p.bias_gradient.data) p.bias_gradient.at<float>(batch, head, row)[key] += of_bias;
        if (p.table_buckets) add_to_table_gradient(p, row, key, of_bias);
        float* of_query = p.query_gradient.at<float>(batch, head, row);
        add_row(p.key.at<float>(batch, kv_head, key), of_product * p.scale, p.dim, of_query);
        add_row(p.query.at<float>(batch, head, row), of_product, p.dim, key_sums + key * lanes_up(p.dim));
    }
}

// Adds `count` sums, which lie `size` floats apart with padded columns, and writes them as T, times a factor.
template <class T>
static void write_sum(const float* sums, int64_t count, int64_t size, int64_t rows, int64_t columns, float factor,
                      const View& view, int64_t batch, int64_t head) {
    const int64_t stride = lanes_up(columns);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j += LANES) {
            Floats total = {};
            for (int64_t n = 0; n < count; n++) total += load(sums + n * size + i * stride + j);
            store_some(view.at<T>(batch, head, i) + j, total * factor, columns - j);
        }
}

template <class T>
static void write_sums(const Problem& p, int64_t batch, int64_t kv_head, const float* sums, int64_t count) {
    const int64_t size = sums_size(p);
    write_sum<T>(sums, count, size, p.keys, p.dim, p.scale, p.key_gradient, batch, kv_head);
    sums += keys_summed(p) * lanes_up(p.dim);
    write_sum<T>(sums, count, size, p.keys, p.value_dim, 1, p.value_gradient, batch, kv_head);
}

}  // namespace clearhead::ISA
