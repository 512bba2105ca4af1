// The backward pass of bfloat16 where the processor multiplies pairs of bfloat16; backward.h says what is computed. Scores
// and dp are products of numbers as they came. Weights and ds have sixteen bits each: with eight, gradients that cancel
// each other would be off by more than their own rounding. As pairs (keys × V·LANES rows) they are a left factor for sums
// over queries (dk, dv) and a right one for sums over keys (dq), so that nothing has to be transposed.
//
// While the vector units make weights and ds of one unit, tile registers multiply those of the unit before with dO, q and
// k, and compute scores and dp of the next.
#pragma once
#include "backward.h"
#include "forward_pairs.h"

namespace clearhead::ISA {

constexpr int BACKWARD_BLOCK = 64;          // keys of a unit, packed for all tiles
constexpr int64_t TILES_BYTES = 768 * 1024;  // of tiles at once, which have to stay in the second cache

struct PairBackwardBuffers {
    Pair *copied_keys, *copied_values, *keys_twice[SIDES];  // (keys × pairs of D or Dv); (D × keys)
    float *weights[2], *gradients[2], *slopes;              // (keys × V·LANES)
    float* masks;
    Matrix<const Pair> keys, values;
};

// The five products of a unit and its neighbours, in the order in which they are due.
struct DueProducts {
    Product of_before[3] = {}, of_next[2] = {};

    void step_of_any() {
        for (Product& product : of_before)
            if (product.unfinished()) return step(product);
        for (Product& product : of_next)
            if (product.unfinished()) return step(product);
    }
    void finish_all() {
        for (Product& product : of_before) finish(product);
        for (Product& product : of_next) finish(product);
    }
};

static void scores_ahead(const Problem& p, const Unit<BackwardTile>& unit, const PairBackwardBuffers& buffers,
                         DueProducts& due) {
    const BackwardTile& tile = *unit.tile;
    const int64_t vectors = tile.vectors, lanes = vectors * LANES;
    const Pair *keys = buffers.keys.at(unit.within, 0), *values = buffers.values.at(unit.within, 0);
    due.of_next[0] = {{keys, buffers.keys.stride}, {as_pairs(tile.query_lanes), lanes}, 1, pairs_up(p.dim), unit.count, vectors,
                      {buffers.weights[unit.slot], lanes}, false};
    due.of_next[1] = {{values, buffers.values.stride}, {as_pairs(tile.gradient_lanes), lanes}, 1, pairs_up(p.value_dim), unit.count, vectors,
                      {buffers.gradients[unit.slot], lanes}, false};
}

static void sums_behind(const Problem& p, const Unit<BackwardTile>& unit, const PairBackwardBuffers& buffers,
                        float* sums, DueProducts& due) {
    const BackwardTile& tile = *unit.tile;
    const int64_t vectors = tile.vectors, lanes = vectors * LANES;
    const int64_t width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    const Matrix<const Pair> weights = {reinterpret_cast<const Pair*>(buffers.weights[unit.slot]), lanes};
    const Matrix<const Pair> gradients = {reinterpret_cast<const Pair*>(buffers.gradients[unit.slot]), lanes};
    const Matrix<float> key_sums = {sums + unit.start * width, width};
    const Matrix<float> value_sums = {sums + keys_summed(p) * width + unit.start * value_width, value_width};
    const Matrix<const Pair> keys = {buffers.keys_twice[unit.side] + unit.within, BACKWARD_BLOCK};
    due.of_before[0] = {weights, {as_pairs(tile.gradient_rows), value_width}, 1, lanes, unit.count, value_width / LANES,
                        value_sums, true};
    due.of_before[1] = {gradients, {as_pairs(tile.query_rows), width}, 1, lanes, unit.count, width / LANES, key_sums, true};
    due.of_before[2] = {keys, gradients, 1, unit.count, height_up(p.dim), vectors, {tile.sums, lanes}, true};
}

// Scores and dp to weights and ds in their places, as pairs. If not PLAIN, there may be dropout, scores may be weights
// already, ds may have to stay a number for now, and weights may miss a factor.
template <int V, bool PLAIN>
static void differentiate_pairs(const Problem& p, const Unit<BackwardTile>& unit, int64_t batch, bool weighed,
                                bool numbers, float* weights, float* gradients, DueProducts& due) {
    const BackwardTile& tile = *unit.tile;
    const bool drop = !PLAIN && p.drop_below;
    const float factor = p.scale * LOG2E;
    for (int64_t j = 0; j < unit.count; j += GROUP)
        UNROLL for (int v = 0; v < V; v++) {
            Ints undropped[GROUP];
            if (drop) dropout_mask(p, tile, batch, v, unit.start + j, undropped);
            const Floats lse = load(tile.lse + v * LANES), correction = load(tile.correction + v * LANES);
            for (int t = 0; t < GROUP; t++) {
                if (t % 2 == 0) due.step_of_any();
                const int64_t place = ((j + t) * V + v) * LANES;
                Floats weight = load(weights + place), x = load(gradients + place);
                if (PLAIN || !weighed) weight = exp2_of_weight(weight * factor - lse);
                if (!PLAIN) weight *= load(tile.missing + v * LANES);
                if (drop) x = only_where(undropped[t], x * p.kept_factor);
                x = weight * (x - correction);
                if (drop) weight = only_where(undropped[t], weight * p.kept_factor);
                store(weights + place, reinterpret_cast<Floats>(split(weight)));
                store(gradients + place, !PLAIN && numbers ? x : reinterpret_cast<Floats>(split(x)));
            }
        }
}

// ds that stayed numbers, for the gradient of a bias or the slope of a soft-cap, become pairs.
template <int V>
static void finish_gradients(const Problem& p, const Unit<BackwardTile>& unit, int64_t batch, const float* slopes,
                             float* gradients) {
    if (p.bias_gradient.data) {
        float factors[TILE];  // which the weights had already
        for (float& factor : factors) factor = 1;
        add_to_bias_gradient(p, *unit.tile, batch, unit.start, unit.start + unit.count, gradients, factors);
    }
    for (int64_t place = 0; place < unit.count * V * LANES; place += LANES) {
        Floats x = load(gradients + place);
        if (p.softcap != 0) x *= load(slopes + place);
        store(gradients + place, reinterpret_cast<Floats>(split(x)));
    }
}

template <int V>
static void attend_back_pairs(const Problem& p, const Unit<BackwardTile>& unit, int64_t batch, bool weighed,
                              const PairBackwardBuffers& buffers, DueProducts& due) {
    float *weights = buffers.weights[unit.slot], *gradients = buffers.gradients[unit.slot];
    const bool numbers = p.softcap != 0 || p.bias_gradient.data;
    if (weighed || numbers || p.drop_below || unit.tile->misses)
        differentiate_pairs<V, false>(p, unit, batch, weighed, numbers, weights, gradients, due);
    else
        differentiate_pairs<V, true>(p, unit, batch, false, false, weights, gradients, due);
    if (numbers) finish_gradients<V>(p, unit, batch, buffers.slopes, gradients);
}

static int64_t pair_tile_floats(const Problem& p) {
    const int64_t width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    return TILE * (pairs_up(p.dim) + pairs_up(p.value_dim) + 3 * width + value_width) + 6 * 16;
}

static int64_t pair_tiles_at_once(const Problem& p) {
    return larger(1, smaller(MOST_TILES, TILES_BYTES / 4 / pair_tile_floats(p)));
}

static int64_t pair_backward_scratch(const Problem& p, int64_t task_rows) {
    const int64_t tiles = smaller(pair_tiles_at_once(p), (task_rows + TILE - 1) / TILE);
    const int64_t of_chunk = BACKWARD_BLOCK * (pairs_up(p.dim) + pairs_up(p.value_dim) + SIDES * height_up(p.dim));
    return of_chunk + 5 * BACKWARD_BLOCK * TILE + MASK_SCRATCH_FLOATS + tiles * pair_tile_floats(p) + 16 * (8 + SIDES);
}

static void prepare_pairs(const Problem& p, int64_t batch, BackwardTile& tile, float*& scratch) {
    const int64_t lanes = tile.vectors * LANES;
    tile.query_lanes = take(scratch, pairs_up(p.dim) * lanes);
    tile.gradient_lanes = take(scratch, pairs_up(p.value_dim) * lanes);
    tile.query_rows = take(scratch, lanes_up(p.dim) * lanes);
    tile.gradient_rows = take(scratch, lanes_up(p.value_dim) * lanes);
    rows_to_pairs(p.query, tile, batch, p.dim, pairs_up(p.dim), false, as_pairs(tile.query_lanes));
    rows_to_pairs(p.output_gradient, tile, batch, p.value_dim, pairs_up(p.value_dim), false, as_pairs(tile.gradient_lanes));
    rows_twice(p.query, tile, batch, p.dim, as_pairs(tile.query_rows));
    rows_twice(p.output_gradient, tile, batch, p.value_dim, as_pairs(tile.gradient_rows));
    begin_query_sums(tile, height_up(p.dim), p.keys > PAIR_RUN, scratch);
    correct<BFloat16>(p, batch, tile);
    tile.misses = false;
    for (const float factor : tile.missing) tile.misses = tile.misses || fabsf(factor - 1) > 0x1p-13f;
}

// A few tiles of rows against all their visible keys.
static void backward_tiles(const Problem& p, const Task& task, BackwardTile* tiles, int64_t count,
                           PairBackwardBuffers& buffers, float* sums) {
    const auto pack = [&](int64_t start, int64_t present, int64_t padded, int side) {
        buffers.keys = find_pairs(p.key, task.batch, task.kv_head, start, present, p.dim, padded, buffers.copied_keys);
        buffers.values = find_pairs(p.value, task.batch, task.kv_head, start, present, p.value_dim, padded, buffers.copied_values);
        transpose_twice(p.key, task.batch, task.kv_head, start, present, p.dim, height_up(p.dim), BACKWARD_BLOCK, padded,
                        buffers.keys_twice[side]);
    };
    Units<BackwardTile, decltype(pack)> units(p, task, tiles, count, BACKWARD_BLOCK, BACKWARD_BLOCK, buffers.masks,
                                                     pack);
    Unit<BackwardTile> now, next;
    DueProducts due;
    bool has_next = units.next(now);
    if (has_next) scores_ahead(p, now, buffers, due);
    due.finish_all();
    while (has_next) {
        const bool weighed = p.softcap != 0 || now.masked();
        if (weighed)
            by_vectors(now.tile->vectors, [&](auto v) {
                by_form(now.mask, [&](auto form) {
                    recompute_probs<v.value, form()>(p, now.tile->lse, now.count, now.mask, buffers.weights[now.slot],
                                                  buffers.slopes);
                });
            });
        has_next = units.next(next);
        if (has_next) scores_ahead(p, next, buffers, due);
        by_vectors(now.tile->vectors,
                   [&](auto v) { attend_back_pairs<v.value>(p, now, task.batch, weighed, buffers, due); });
        due.finish_all();
        if (now.tile->summed + now.count > PAIR_RUN) end_query_run(*now.tile);
        now.tile->summed += now.count;
        sums_behind(p, now, buffers, sums, due);
        now = next;
    }
    due.finish_all();
}

template <>
void backward<BFloat16>(const Problem& p, const Task& task, float* sums, float* scratch) {
    PairBackwardBuffers buffers;
    buffers.copied_keys = take_pairs(scratch, BACKWARD_BLOCK * pairs_up(p.dim));
    buffers.copied_values = take_pairs(scratch, BACKWARD_BLOCK * pairs_up(p.value_dim));
    for (Pair*& keys : buffers.keys_twice) keys = take_pairs(scratch, height_up(p.dim) * BACKWARD_BLOCK);
    for (float*& weights : buffers.weights) weights = take(scratch, BACKWARD_BLOCK * TILE);
    for (float*& gradients : buffers.gradients) gradients = take(scratch, BACKWARD_BLOCK * TILE);
    buffers.slopes = take(scratch, BACKWARD_BLOCK * TILE);
    buffers.masks = take(scratch, MASK_SCRATCH_FLOATS);
    const TileRegisters registers;
    const int64_t step = pair_tiles_at_once(p) * TILE;
    for (int64_t row = task.row_start; row < task.row_stop; row += step) {
        BackwardTile tiles[MOST_TILES];
        float *memory = scratch, factors[TILE];
        const int64_t stop = smaller(row + step, task.row_stop);
        const int64_t count = describe_tiles(
            p, task, row, stop, tiles, [&](BackwardTile& tile) { prepare_pairs(p, task.batch, tile, memory); });
        backward_tiles(p, task, tiles, count, buffers, sums);
        for (float& factor : factors) factor = p.scale;
        for (int64_t n = 0; n < count; n++)
            write_query_gradient<BFloat16>(p, task.batch, tiles[n], factors);
    }
}

static int64_t scratch_of_forward(const Problem& p, int64_t task_rows) {
    return p.type == bfloat16 ? pair_forward_scratch(p, task_rows) : avx512_kernels.forward_scratch(p, task_rows);
}

static int64_t scratch_of_backward(const Problem& p, int64_t task_rows) {
    const bool pairs = p.type == bfloat16 && !p.few;
    return pairs ? pair_backward_scratch(p, task_rows) : avx512_kernels.backward_scratch(p, task_rows);
}

static void backward_unless_few(const Problem& p, const Task& task, float* sums, float* scratch) {
    if (p.few) return avx512_kernels.backward[bfloat16](p, task, sums, scratch);
    backward<BFloat16>(p, task, sums, scratch);
}

// The passes of bfloat16 of a source that defines what isa.h lists, and HAS_AMX if there are tile registers. Everything
// else is AVX-512's.
constexpr Kernels table(const char* name, bool (*supported)()) {
    Kernels pairs = {};
    pairs.name = name, pairs.supported = supported;
    pairs.forward_scratch = scratch_of_forward, pairs.forward[bfloat16] = forward<BFloat16>;
    pairs.backward_scratch = scratch_of_backward, pairs.backward[bfloat16] = backward_unless_few;
    return pairs;
}

}  // namespace clearhead::ISA
