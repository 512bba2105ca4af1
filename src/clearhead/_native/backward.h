// The backward pass: weights are computed again from the log-sum-exp, and with dO the output's gradient, dp = dO vᵀ
// (dropped as p was), δ = Σ_j p dp = dO·o and dl that of lse: ds = p (dp − δ + dl). Sums over queries (dk, dv) are kept
// for the whole length of the keys, sums over keys (dq) for a few tiles of rows at a time.
//
// Where one weight is nearly 1, dp − δ of its key is the difference of two nearly equal numbers, and their rounding would
// be all there is of ds. But the sum of ds over the keys is known: 0 without sinks and dl. In float32, ds of a key whose
// weight is above one half (the heavy key of its row) is therefore that sum less ds of the other keys, added at the end.
#pragma once
#include "decode.h"

namespace clearhead::ISA {

constexpr float HEAVY_WEIGHT = 0.51f;  // so far above one half that rounding cannot make two keys of a row heavy

struct BackwardTile {
    Rows rows;
    float *query_lanes, *gradient_lanes;  // (D × V·LANES), (Dv × V·LANES)
    float *query_rows, *gradient_rows;    // (V·LANES × D), (V·LANES × Dv), columns padded to whole vectors
    float* few_queries;                   // the queries as decoding reads them, where it was the forward pass
    float *query_sums, *query_totals;     // (D × V·LANES), of a run of keys, and of those before or null
    float lse[TILE], correction[TILE];    // lse in units of log 2, rounded,
    float missing[TILE];                  // and the factor of the weights that makes up for the rounding
    float heavy_above[TILE];              // the weight above which a key is the heavy one,
    int32_t heavy_key[TILE];              // which one it is, or −1,
    float heavy_slope[TILE];              // that of the soft-cap at its score,
    double light_sum[TILE];               // and the sum of ds of all other keys
};

// Working memory of one task.
struct BackwardRoom {
    float *keys, *values, *weights, *gradients, *slopes;
    MaskScratch masks;
};

// to (count × V·LANES) = left (count × columns) · right (columns × V·LANES); calls between(step) before each step
template <int V, class Between>
static void product(const float* left, int64_t stride, int64_t columns, const float* right, int64_t count, float* to,
                    const Between& between) {
    for (int64_t j = 0; j < count; j += STEP) {
        between(j / STEP);
        Floats acc[STEP][V] = {};
        multiply<true>(acc, left + j * stride, stride, right, V * LANES, columns);
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) store(to + ((j + t) * V + v) * LANES, acc[t][v]);
    }
}

// to (keys × columns) += left (keys × rows) · right (rows × columns), V vectors of columns
template <int V>
static void add_columns(const float* left, int64_t rows, const float* right, int64_t stride, int64_t keys, float* to) {
    for (int64_t j = 0; j < keys; j += STEP) {
        Floats acc[STEP][V] = {};
        multiply<true>(acc, left + j * rows, rows, right, stride, rows);
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                float* place = to + (j + t) * stride + v * LANES;
                store(place, load(place) + acc[t][v]);
            }
    }
}

static void add_products(const float* left, int64_t rows, const float* right, int64_t stride, int64_t keys, float* to) {
    for (int64_t d = 0; d < stride;) {
        const int64_t left_over = (stride - d) / LANES;
        if (left_over >= 3 && left_over != 4) {
            add_columns<3>(left, rows, right + d, stride, keys, to + d);
            d += 3 * LANES;
        } else if (left_over >= 2) {
            add_columns<2>(left, rows, right + d, stride, keys, to + d);
            d += 2 * LANES;
        } else {
            add_columns<1>(left, rows, right + d, stride, keys, to + d);
            d += LANES;
        }
    }
}

// Scores to weights in place; with a soft-cap its slope goes into `slopes`.
template <int V, MaskForm FORM>
static void recompute_probs(const Problem& p, const float* lse, int64_t count, const TileMask& mask, float* weights,
                        float* slopes) {
    const float factor = p.softcap != 0 ? p.scale / p.softcap : p.scale * LOG2E;
    for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const int64_t place = (j * V + v) * LANES;
            Floats x = rounded(load(weights + place) * factor);
            if (p.softcap != 0) {
                x = tanh(x);
                store(slopes + place, 1.f - x * x);
                x *= p.softcap * LOG2E;
            }
            x = masked<FORM, V>(x, mask, j, v);
            store(weights + place, exp2(x - load(lse + v * LANES)));
        }
}

// dp to ds, before the soft-cap, in place; the weights become the dropped ones. With HEAVY, ds of a heavy key is left out.
template <int V, bool HEAVY>
static void differentiate(const Problem& p, BackwardTile& tile, int64_t batch, int64_t key, int64_t count,
                          float* weights, float* gradients) {
    [[maybe_unused]] Floats light_sum[V] = {};
    for (int64_t j = 0; j < count; j += GROUP)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            Ints kept[GROUP];
            if (p.drop_below) dropout_mask(p, tile.rows, batch, v, key + j, kept);
            const Floats correction = load(tile.correction + v * LANES);
            [[maybe_unused]] const Floats above = load(tile.heavy_above + v * LANES);
            [[maybe_unused]] Ints heavy_key = load(tile.heavy_key + v * LANES);
            Floats ds[GROUP];
#pragma GCC unroll 8
            for (int t = 0; t < GROUP; t++) {
                const int64_t place = ((j + t) * V + v) * LANES;
                const Floats weight = load(weights + place);
                Floats x = load(gradients + place);
                if (p.drop_below) {
                    x = only_where(kept[t], x);
                    store(weights + place, only_where(kept[t], weight));
                }
                ds[t] = weight * (x - correction);
                if (HEAVY) {
                    const Ints heavy = weight > above;
                    ds[t] = heavy ? Floats{} : ds[t];
                    heavy_key = heavy ? splat(static_cast<int32_t>(key + j + t)) : heavy_key;
                }
                store(gradients + place, ds[t]);
            }
            if (HEAVY) {
                light_sum[v] += sum_of_group(ds);
                store(tile.heavy_key + v * LANES, heavy_key);
            }
        }
    for (int lane = 0; HEAVY && lane < V * LANES; lane++) tile.light_sum[lane] += light_sum[lane / LANES][lane % LANES];
}

// The slopes of the soft-cap at the heavy keys among [start, stop).
static void keep_heavy_slopes(BackwardTile& tile, int64_t start, int64_t stop, const float* slopes) {
    for (int64_t lane = 0; lane < tile.rows.count; lane++) {
        const int64_t key = tile.heavy_key[lane];
        if (start <= key && key < stop)
            tile.heavy_slope[lane] = slopes[(key - start) * tile.rows.vectors * LANES + lane];
    }
}

// to += factor · from
INLINE void add_row(const float* from, float factor, int64_t count, float* to) {
    for (int64_t j = 0; j < count; j += LANES)
        store_some(to + j, load_some(to + j, count - j) + factor * load_some(from + j, count - j), count - j);
}

// Adds what ds of the heavy keys contribute to the gradients, dq of which is written.
static void add_heavy_keys(const Problem& p, const BackwardTile& tile, int64_t batch, int64_t kv_head, float* key_sums) {
    for (int64_t lane = 0; lane < tile.rows.count; lane++) {
        const int64_t head = tile.rows.head[lane], row = tile.rows.row[lane], key = tile.heavy_key[lane];
        if (p.heavy_keys)
            p.heavy_keys[p.row_place(batch, head, row)] = {tile.light_sum[lane] * tile.missing[lane], key, tile.heavy_slope[lane]};
        if (p.heavy_keys || key < 0) continue;
        const double ds = p.sum_of_score_gradients(batch, head, row) - tile.light_sum[lane] * tile.missing[lane];
        const float of_bias = static_cast<float>(ds), of_product = of_bias * tile.heavy_slope[lane];
        if (p.bias_gradient.data) p.bias_gradient.at<float>(batch, head, row)[key] += of_bias;
        add_row(p.key.at<float>(batch, kv_head, key), of_product * p.scale, p.dim, p.query_gradient.at<float>(batch, head, row));
        add_row(p.query.at<float>(batch, head, row), of_product, p.dim, key_sums + key * lanes_up(p.dim));
    }
}

// ds, which is what a bias has for a gradient, from the lanes back into its rows.
template <int V>
static void add_to_bias_gradient(const Problem& p, const Rows& rows, int64_t batch, int64_t start, int64_t stop,
                                 const float* gradients, const float* factors) {
    stop = smaller(stop, p.keys);
    for (int v = 0; v < V; v++)
        for (int64_t j = start; j < stop; j += LANES) {
            const int64_t count = smaller(LANES, stop - j);
            Floats square[LANES];
            for (int64_t r = 0; r < LANES; r++)
                square[r] = r < count ? load(gradients + ((j - start + r) * V + v) * LANES) : Floats{};
            transpose(square);
            for (int64_t lane = v * LANES; lane < smaller(rows.count, (v + 1) * LANES); lane++) {
                float* to = p.bias_gradient.at<float>(batch, rows.head[lane], rows.row[lane]) + j;
                store_some(to, load_some(to, count) + square[lane - v * LANES] * factors[lane], count);
            }
        }
}

// The same products with the queries in the order in which decoding has summed them: where scores are large, weights
// from scores that are rounded in another way would not sum to 1.
template <int V>
static void score_few(const Problem& p, const BackwardTile& tile, const float* keys, int64_t count, float* to) {
    const int64_t width = lanes_up(p.dim), stride = step_up(p.dim);
    memset(to, 0, static_cast<size_t>(count * V * LANES) * sizeof(float));
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t r = 0; r < tile.rows.count; r += TOGETHER) {  // which may take in rows of zeros
            const int64_t there = smaller(LANES, count - j);
            Floats dot[TOGETHER];
            dots(tile.few_queries + r * width, width, keys + j * stride, stride, p.dim, there, dot);
            for (int64_t k = 0; k < there; k++)
                for (int n = 0; n < TOGETHER; n++) to[(j + k) * V * LANES + r + n] = dot[n][k];
        }
}

// One tile against the keys [start, stop), whose sums of dk and dv are given.
template <int V, bool HEAVY>
static void attend_back(const Problem& p, BackwardTile& tile, int64_t batch, int64_t start, int64_t stop,
                        const BackwardRoom& room, const NextMasks& next, const float* keys, const float* values,
                        float* key_sums, float* value_sums) {
    const TileMask mask = tile_mask<V>(p, tile.rows, batch, start, stop, room.masks);
    if (mask.coverage == Coverage::nothing) return;
    const int64_t count = stop - start, key_stride = step_up(p.dim), rows = V * LANES;
    if (p.few)
        score_few<V>(p, tile, keys, count, room.weights);
    else
        product<V>(keys, key_stride, p.dim, tile.query_lanes, count, room.weights, [&](int64_t step) {
            if (next.start < next.stop) next.fetch(p, step, count / STEP);
        });
    by_form(mask, [&](auto form) { recompute_probs<V, form()>(p, tile.lse, count, mask, room.weights, room.slopes); });
    product<V>(values, p.value_dim, p.value_dim, tile.gradient_lanes, count, room.gradients, [](int64_t) {});
    differentiate<V, HEAVY>(p, tile, batch, start, count, room.weights, room.gradients);
    if (HEAVY && p.softcap != 0) keep_heavy_slopes(tile, start, stop, room.slopes);
    if (p.bias_gradient.data) add_to_bias_gradient<V>(p, tile.rows, batch, start, stop, room.gradients, tile.missing);
    if (p.softcap != 0)
        for (int64_t place = 0; place < count * rows; place += LANES)
            store(room.gradients + place, load(room.gradients + place) * load(room.slopes + place));
    add_products(room.weights, rows, tile.gradient_rows, lanes_up(p.value_dim), count, value_sums);
    add_products(room.gradients, rows, tile.query_rows, lanes_up(p.dim), count, key_sums);
    for (int64_t d = 0; d < p.dim; d += STEP) {
        Floats acc[STEP][V] = {};
        float* sums = tile.query_sums + d * rows;
        multiply<false>(acc, keys + d, key_stride, room.gradients, rows, count);
#pragma GCC unroll 8
        for (int t = 0; t < STEP; t++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                float* place = sums + (t * V + v) * LANES;
                store(place, load(place) + acc[t][v]);
            }
    }
}

static int64_t tiles_at_once(const Problem& p) { return p.dim + p.value_dim > 256 ? 4 : 8; }

static int64_t tile_floats(const Problem& p) {
    return TILE * (3 * step_up(p.dim) + p.value_dim + 2 * lanes_up(p.dim) + lanes_up(p.value_dim)) + 7 * 16;
}

[[maybe_unused]] static int64_t backward_scratch(const Problem& p, int64_t task_rows) {
    const int64_t tiles = smaller(tiles_at_once(p), (task_rows + TILE - 1) / TILE);
    return BLOCK * (step_up(p.dim) + p.value_dim) + 3 * BLOCK * TILE + MASK_SCRATCH_FLOATS + tiles * tile_floats(p) + 6 * 16;
}

// dk (S × D), then dv (S × Dv), columns padded to whole vectors.
static int64_t keys_summed(const Problem& p) { return round_up(p.keys, KEY_STEP); }
static int64_t sums_size(const Problem& p) { return keys_summed(p) * (lanes_up(p.dim) + lanes_up(p.value_dim)); }

// The rows of a tile one under the other, times a factor and their own ones; zeros where there is no row.
template <class T>
static void copy_rows(const View& view, const Rows& rows, int64_t batch, int64_t columns, float factor,
                      const float* factors, float* to) {
    const int64_t stride = lanes_up(columns);
    for (int64_t lane = 0; lane < rows.vectors * LANES; lane++, to += stride) {
        if (lane >= rows.count) {
            memset(to, 0, static_cast<size_t>(stride) * sizeof(float));
            continue;
        }
        const T* from = view.at<T>(batch, rows.head[lane], rows.row[lane]);
        for (int64_t j = 0; j < columns; j += LANES)
            store(to + j, factor * factors[lane] * load_some(from + j, columns - j));
    }
}

typedef double Doubles __attribute__((vector_size(LANES * 4)));

// Σ of products, in float64: what cancels in dp − δ is as large as δ, and its error is the same for all keys.
template <class T>
INLINE double dot(const float* x, const T* y, int64_t count) {
    typedef float Half __attribute__((vector_size(LANES * 2)));
    Doubles total = {};
    for (int64_t j = 0; j < count; j += LANES) {
        const Floats both[2] = {load_some(x + j, count - j), load_some(y + j, count - j)};
        Half halves[4];
        memcpy(halves, both, sizeof both);
        for (int n = 0; n < 2; n++)
            total += __builtin_convertvector(halves[n], Doubles) * __builtin_convertvector(halves[n + 2], Doubles);
    }
    for (int half = LANES / 4; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) total[lane] += total[lane + half];
    return total[0];
}

template <class T>
static void correct(const Problem& p, int64_t batch, const Rows& rows, float* lse, float* correction, float* missing) {
    for (int64_t lane = 0; lane < TILE; lane++) {
        lse[lane] = -LOWEST;  // a lane without a row has weights of zero
        correction[lane] = missing[lane] = 0;
        if (lane >= rows.count) continue;
        const int64_t place = p.row_place(batch, rows.head[lane], rows.row[lane]);
        const float* output = p.exact_output.at<float>(batch, rows.head[lane], rows.row[lane]);
        const T* gradient = p.output_gradient.at<T>(batch, rows.head[lane], rows.row[lane]);
        const double delta = dot(output, gradient, p.value_dim);
        correction[lane] = static_cast<float>(delta - (p.lse_gradient ? p.lse_gradient[place] : 0));
        // No weight can be told from the lowest lse, that of a row whose every score is the lowest number: it has none here.
        const double exact = p.lse[place] * LOG2_OF_E;
        const bool usual = p.lse[place] != -INFINITY && p.lse[place] != LOWEST;
        lse[lane] = usual ? static_cast<float>(exact) : p.lse[place] == LOWEST ? -LOWEST : 0;
        if (usual) missing[lane] = static_cast<float>(lse[lane] - exact);
        p.correction[place] = correction[lane];
    }
    for (int lane = 0; lane < TILE; lane += LANES) store(missing + lane, exp2(load(missing + lane)));
}

template <class SomeTile>
static void clear_query_sums(SomeTile& tile, int64_t floats) {
    memset(tile.query_sums, 0, static_cast<size_t>(floats) * sizeof(float));
    if (tile.query_totals) memset(tile.query_totals, 0, static_cast<size_t>(floats) * sizeof(float));
}

// Adds the sums of a run to the total; the next run begins with zeros.
template <class SomeTile>
static void end_query_run(SomeTile& tile, int64_t floats) {
    for (int64_t place = 0; place < floats; place += LANES) {
        store(tile.query_totals + place, load(tile.query_totals + place) + load(tile.query_sums + place));
        store(tile.query_sums + place, Floats{});
    }
}

// Writes dq of a tile, whose rows have factors of their own.
template <class T, class SomeTile>
static void write_query_gradient(const Problem& p, int64_t batch, SomeTile& tile, int64_t height, const float* factors) {
    const int64_t floats = height * tile.rows.vectors * LANES;
    for (int64_t place = 0; tile.query_totals && place < floats; place += LANES)
        store(tile.query_sums + place, load(tile.query_totals + place) + load(tile.query_sums + place));
    lanes_to_rows<T>(tile.query_sums, tile.rows, batch, p.dim, factors, p.query_gradient);
}

template <class T>
static void prepare(const Problem& p, int64_t batch, BackwardTile& tile, float*& scratch) {
    const int64_t lanes = tile.rows.vectors * LANES;
    tile.query_lanes = take(scratch, p.dim * lanes);
    tile.gradient_lanes = take(scratch, p.value_dim * lanes);
    tile.query_rows = take(scratch, lanes_up(p.dim) * lanes);
    tile.gradient_rows = take(scratch, lanes_up(p.value_dim) * lanes);
    tile.query_sums = take(scratch, step_up(p.dim) * lanes);
    tile.query_totals = has_totals(p) ? take(scratch, step_up(p.dim) * lanes) : nullptr;
    correct<T>(p, batch, tile.rows, tile.lse, tile.correction, tile.missing);
    for (int lane = 0; lane < TILE; lane++) {
        tile.heavy_above[lane] = p.whole_rows ? HEAVY_WEIGHT / tile.missing[lane] : INFINITY;
        tile.heavy_key[lane] = -1, tile.heavy_slope[lane] = 1, tile.light_sum[lane] = 0;
    }
    rows_to_lanes<T>(p.query, tile.rows, batch, p.dim, 1, tile.query_lanes);
    rows_to_lanes<T>(p.output_gradient, tile.rows, batch, p.value_dim, p.kept_factor, tile.gradient_lanes);
    copy_rows<T>(p.query, tile.rows, batch, p.dim, 1, tile.missing, tile.query_rows);
    if (p.few) {
        tile.few_queries = take(scratch, lanes_up(p.dim) * lanes);
        float ones[TILE];
        for (float& factor : ones) factor = 1;
        copy_rows<T>(p.query, tile.rows, batch, p.dim, 1, ones, tile.few_queries);
    }
    copy_rows<T>(p.output_gradient, tile.rows, batch, p.value_dim, p.kept_factor, tile.missing, tile.gradient_rows);
    clear_query_sums(tile, step_up(p.dim) * lanes);
}

// A few tiles of rows against all the keys they see.
template <class T>
static void backward_rows(const Problem& p, const Task& task, int64_t row_start, int64_t row_stop,
                          const BackwardRoom& room, float* sums, float* scratch) {
    constexpr bool HEAVY = sizeof(T) == sizeof(float);  // in half precision the rounding of the results is larger
    const int64_t b = task.batch;
    BackwardTile tiles[8];
    int64_t count = 0, key_start = p.keys, key_stop = 0;
    for (int64_t start = row_start; start < row_stop; start += TILE, count++) {
        describe_rows(p, b, task.kv_head, start, row_stop, tiles[count].rows);
        if (task.masks) tiles[count].rows.masks = task.masks + (start - task.row_start) / TILE * masks_size(p);
        prepare<T>(p, b, tiles[count], scratch);
        key_start = smaller(key_start, tiles[count].rows.lowest_first);
        key_stop = larger(key_stop, tiles[count].rows.highest_last);
    }
    const int64_t key_stride = step_up(p.dim), key_width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    float* value_sums = sums + keys_summed(p) * key_width;
    const int64_t first = key_start / BLOCK * BLOCK, run = run_length((key_stop - first) / BLOCK) * BLOCK;
    for (int64_t block = first; block < key_stop; block += BLOCK) {
        for (int64_t n = 0; n < count && block > first && (block - first) % run == 0; n++)
            end_query_run(tiles[n], step_up(p.dim) * tiles[n].rows.vectors * LANES);
        const int64_t end = smaller(block + BLOCK, p.keys), padded = round_up(end - block, GROUP);
        widen_rows(p.key.at<T>(b, task.kv_head, block), p.key.row, end - block, p.dim, room.keys, key_stride, padded);
        widen_rows(p.value.at<T>(b, task.kv_head, block), p.value.row, end - block, p.value_dim, room.values,
                   p.value_dim, padded);
        for (int64_t n = 0; n < count; n++) {
            fetch_part<T>(p, b, task.kv_head, block + BLOCK, n, count);
            int64_t start = block, stop = block + padded;
            trim(tiles[n].rows, start, stop);
            if (start >= stop) continue;
            const bool last = n + 1 == count;
            const NextMasks next = next_masks(p, tiles[last ? 0 : n + 1].rows, b, last ? block + BLOCK : block);
            const float *k = room.keys + (start - block) * key_stride, *v = room.values + (start - block) * p.value_dim;
            float *dk = sums + start * key_width, *dv = value_sums + start * value_width;
            by_vectors(tiles[n].rows.vectors, [&](auto vectors) {
                attend_back<vectors.value, HEAVY>(p, tiles[n], b, start, stop, room, next, k, v, dk, dv);
            });
        }
    }
    for (int64_t n = 0; n < count; n++) {
        float factors[TILE];
        for (int lane = 0; lane < TILE; lane++) factors[lane] = p.scale * tiles[n].missing[lane];
        write_query_gradient<T>(p, b, tiles[n], step_up(p.dim), factors);
        if (HEAVY) add_heavy_keys(p, tiles[n], b, task.kv_head, sums);
    }
}

template <class T>
static void backward_typed(const Problem& p, const Task& task, float* sums, float* scratch) {
    BackwardRoom room;
    room.keys = take(scratch, BLOCK * step_up(p.dim));
    room.values = take(scratch, BLOCK * p.value_dim);
    room.weights = take(scratch, BLOCK * TILE);
    room.gradients = take(scratch, BLOCK * TILE);
    room.masks = mask_scratch(take(scratch, MASK_SCRATCH_FLOATS));
    room.slopes = take(scratch, BLOCK * TILE);
    const int64_t step = tiles_at_once(p) * TILE;
    for (int64_t start = task.row_start; start < task.row_stop; start += step)
        backward_rows<T>(p, task, start, smaller(start + step, task.row_stop), room, sums, scratch);
}

// Σ over `count` sums, `size` floats apart and their columns padded, to one matrix of T, times a factor.
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
static void write_sums_typed(const Problem& p, int64_t batch, int64_t kv_head, const float* sums, int64_t count) {
    const int64_t size = sums_size(p);
    write_sum<T>(sums, count, size, p.keys, p.dim, p.scale, p.key_gradient, batch, kv_head);
    sums += keys_summed(p) * lanes_up(p.dim);
    write_sum<T>(sums, count, size, p.keys, p.value_dim, 1, p.value_gradient, batch, kv_head);
}

}  // namespace clearhead::ISA
