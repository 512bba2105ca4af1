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

struct PairBackwardTile {
    Rows rows;
    Pair *query, *gradient;              // (pairs of D × V·LANES), (pairs of Dv × V·LANES)
    Pair *query_twice, *gradient_twice;  // (V·LANES × D), (V·LANES × Dv), each number twice
    float *query_sums, *query_totals;    // (D × V·LANES), of a run of keys, and of those before or null
    float lse[TILE], correction[TILE], missing[TILE];  // as in backward.h
    bool misses;                                       // whether `missing` is more than the rounding of weights
    int64_t summed;                                    // keys of this run
};

struct PairBackwardRoom {
    Pair *copied_keys, *copied_values, *keys_twice[SIDES];  // (keys × pairs of D or Dv); (D × keys)
    float *weights[2], *gradients[2], *slopes;              // (keys × V·LANES)
    MaskScratch masks;
    Matrix<const Pair> keys, values;
};

// The five products of a unit and its neighbours, in the order in which they are due.
struct DueProducts {
    Product of_before[3] = {}, of_next[2] = {};

    void step_of_any() {
        for (Product& product : of_before)
            if (product.left_over()) return step(product);
        for (Product& product : of_next)
            if (product.left_over()) return step(product);
    }
    void finish_all() {
        for (Product& product : of_before) finish(product);
        for (Product& product : of_next) finish(product);
    }
};

static void scores_ahead(const Problem& p, const Unit<PairBackwardTile>& unit, const PairBackwardRoom& room,
                         DueProducts& due) {
    const PairBackwardTile& tile = *unit.tile;
    const int64_t vectors = tile.rows.vectors, lanes = vectors * LANES;
    const Pair *keys = room.keys.at(unit.within, 0), *values = room.values.at(unit.within, 0);
    due.of_next[0] = {{keys, room.keys.stride}, {tile.query, lanes}, 1, pairs_up(p.dim), unit.count, vectors,
                      {room.weights[unit.slot], lanes}, false};
    due.of_next[1] = {{values, room.values.stride}, {tile.gradient, lanes}, 1, pairs_up(p.value_dim), unit.count, vectors,
                      {room.gradients[unit.slot], lanes}, false};
}

static void sums_behind(const Problem& p, const Unit<PairBackwardTile>& unit, const PairBackwardRoom& room,
                        float* sums, DueProducts& due) {
    const PairBackwardTile& tile = *unit.tile;
    const int64_t vectors = tile.rows.vectors, lanes = vectors * LANES;
    const int64_t width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    const Matrix<const Pair> weights = {reinterpret_cast<const Pair*>(room.weights[unit.slot]), lanes};
    const Matrix<const Pair> gradients = {reinterpret_cast<const Pair*>(room.gradients[unit.slot]), lanes};
    const Matrix<float> key_sums = {sums + unit.start * width, width};
    const Matrix<float> value_sums = {sums + keys_summed(p) * width + unit.start * value_width, value_width};
    const Matrix<const Pair> keys = {room.keys_twice[unit.side] + unit.within, BACKWARD_BLOCK};
    due.of_before[0] = {weights, {tile.gradient_twice, value_width}, 1, lanes, unit.count, value_width / LANES,
                        value_sums, true};
    due.of_before[1] = {gradients, {tile.query_twice, width}, 1, lanes, unit.count, width / LANES, key_sums, true};
    due.of_before[2] = {keys, gradients, 1, unit.count, height_up(p.dim), vectors, {tile.query_sums, lanes}, true};
}

// Scores and dp to weights and ds in their places, as pairs. If not PLAIN, there may be dropout, scores may be weights
// already, ds may have to stay a number for now, and weights may miss a factor.
template <int V, bool PLAIN>
static void differentiate_pairs(const Problem& p, const Unit<PairBackwardTile>& unit, int64_t batch, bool weighed,
                                bool numbers, float* weights, float* gradients, DueProducts& due) {
    const PairBackwardTile& tile = *unit.tile;
    const bool drop = !PLAIN && p.drop_below;
    const float factor = p.scale * LOG2E;
    for (int64_t j = 0; j < unit.count; j += GROUP)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            Ints kept[GROUP];
            if (drop) dropout_mask(p, tile.rows, batch, v, unit.start + j, kept);
            const Floats lse = load(tile.lse + v * LANES), correction = load(tile.correction + v * LANES);
            for (int t = 0; t < GROUP; t++) {
                if (t % 2 == 0) due.step_of_any();
                const int64_t place = ((j + t) * V + v) * LANES;
                Floats weight = load(weights + place), x = load(gradients + place);
                if (PLAIN || !weighed) weight = exp2_of_weight(weight * factor - lse);
                if (!PLAIN) weight *= load(tile.missing + v * LANES);
                if (drop) x = only_where(kept[t], x * p.kept_factor);
                x = weight * (x - correction);
                if (drop) weight = only_where(kept[t], weight * p.kept_factor);
                store(weights + place, reinterpret_cast<Floats>(split(weight)));
                store(gradients + place, !PLAIN && numbers ? x : reinterpret_cast<Floats>(split(x)));
            }
        }
}

// ds that stayed numbers, for the gradient of a bias or the slope of a soft-cap, become pairs.
template <int V>
static void finish_gradients(const Problem& p, const Unit<PairBackwardTile>& unit, int64_t batch, const float* slopes,
                             float* gradients) {
    if (p.bias_gradient.data) {
        float factors[TILE];  // which the weights had already
        for (float& factor : factors) factor = 1;
        add_to_bias_gradient<V>(p, unit.tile->rows, batch, unit.start, unit.start + unit.count, gradients, factors);
    }
    for (int64_t place = 0; place < unit.count * V * LANES; place += LANES) {
        Floats x = load(gradients + place);
        if (p.softcap != 0) x *= load(slopes + place);
        store(gradients + place, reinterpret_cast<Floats>(split(x)));
    }
}

template <int V>
static void attend_back_pairs(const Problem& p, const Unit<PairBackwardTile>& unit, int64_t batch, bool weighed,
                              const PairBackwardRoom& room, DueProducts& due) {
    float *weights = room.weights[unit.slot], *gradients = room.gradients[unit.slot];
    const bool numbers = p.softcap != 0 || p.bias_gradient.data;
    if (weighed || numbers || p.drop_below || unit.tile->misses)
        differentiate_pairs<V, false>(p, unit, batch, weighed, numbers, weights, gradients, due);
    else
        differentiate_pairs<V, true>(p, unit, batch, false, false, weights, gradients, due);
    if (numbers) finish_gradients<V>(p, unit, batch, room.slopes, gradients);
}

static int64_t pair_tile_floats(const Problem& p) {
    const int64_t width = lanes_up(p.dim), value_width = lanes_up(p.value_dim);
    return TILE * (pairs_up(p.dim) + pairs_up(p.value_dim) + 3 * width + value_width) + 6 * 16;
}

static int64_t pair_tiles_at_once(const Problem& p) {
    return larger(1, smaller(MOST_TILES, TILES_BYTES / 4 / pair_tile_floats(p)));
}

static int64_t backward_scratch_of_pairs(const Problem& p, int64_t task_rows) {
    const int64_t tiles = smaller(pair_tiles_at_once(p), (task_rows + TILE - 1) / TILE);
    const int64_t of_chunk = BACKWARD_BLOCK * (pairs_up(p.dim) + pairs_up(p.value_dim) + SIDES * height_up(p.dim));
    return of_chunk + 5 * BACKWARD_BLOCK * TILE + MASK_SCRATCH_FLOATS + tiles * pair_tile_floats(p) + 16 * (8 + SIDES);
}

static void prepare_pairs(const Problem& p, int64_t batch, PairBackwardTile& tile, float*& scratch) {
    const int64_t lanes = tile.rows.vectors * LANES, height = height_up(p.dim);
    tile.query = take_pairs(scratch, pairs_up(p.dim) * lanes);
    tile.gradient = take_pairs(scratch, pairs_up(p.value_dim) * lanes);
    tile.query_twice = take_pairs(scratch, lanes_up(p.dim) * lanes);
    tile.gradient_twice = take_pairs(scratch, lanes_up(p.value_dim) * lanes);
    tile.query_sums = take(scratch, height * lanes);
    tile.query_totals = p.keys > PAIR_RUN ? take(scratch, height * lanes) : nullptr;
    tile.summed = 0;
    rows_to_pairs(p.query, tile.rows, batch, p.dim, pairs_up(p.dim), false, tile.query);
    rows_to_pairs(p.output_gradient, tile.rows, batch, p.value_dim, pairs_up(p.value_dim), false, tile.gradient);
    rows_twice(p.query, tile.rows, batch, p.dim, tile.query_twice);
    rows_twice(p.output_gradient, tile.rows, batch, p.value_dim, tile.gradient_twice);
    clear_query_sums(tile, height * lanes);
    correct<BFloat16>(p, batch, tile.rows, tile.lse, tile.correction, tile.missing);
    tile.misses = false;
    for (const float factor : tile.missing) tile.misses = tile.misses || fabsf(factor - 1) > 0x1p-13f;
}

// A few tiles of rows against all the keys they see.
static void backward_tiles(const Problem& p, const Task& task, PairBackwardTile* tiles, int64_t count,
                           PairBackwardRoom& room, float* sums) {
    const auto pack = [&](int64_t start, int64_t there, int64_t padded, int side) {
        room.keys = find_pairs(p.key, task.batch, task.kv_head, start, there, p.dim, padded, room.copied_keys);
        room.values = find_pairs(p.value, task.batch, task.kv_head, start, there, p.value_dim, padded, room.copied_values);
        transpose_twice(p.key, task.batch, task.kv_head, start, there, p.dim, height_up(p.dim), BACKWARD_BLOCK, padded,
                        room.keys_twice[side]);
    };
    Units<PairBackwardTile, decltype(pack)> units(p, task, tiles, count, BACKWARD_BLOCK, BACKWARD_BLOCK, room.masks,
                                                     pack);
    Unit<PairBackwardTile> now, next;
    DueProducts due;
    bool more = units.next(now);
    if (more) scores_ahead(p, now, room, due);
    due.finish_all();
    while (more) {
        const bool weighed = p.softcap != 0 || now.masked();
        if (weighed)
            by_vectors(now.tile->rows.vectors, [&](auto v) {
                by_form(now.mask, [&](auto form) {
                    recompute_probs<v.value, form()>(p, now.tile->lse, now.count, now.mask, room.weights[now.slot],
                                                  room.slopes);
                });
            });
        more = units.next(next);
        if (more) scores_ahead(p, next, room, due);
        by_vectors(now.tile->rows.vectors,
                   [&](auto v) { attend_back_pairs<v.value>(p, now, task.batch, weighed, room, due); });
        due.finish_all();
        if (now.tile->summed + now.count > PAIR_RUN) {
            end_query_run(*now.tile, height_up(p.dim) * now.tile->rows.vectors * LANES);
            now.tile->summed = 0;
        }
        now.tile->summed += now.count;
        sums_behind(p, now, room, sums, due);
        now = next;
    }
    due.finish_all();
}

template <>
void backward_typed<BFloat16>(const Problem& p, const Task& task, float* sums, float* scratch) {
    PairBackwardRoom room;
    room.copied_keys = take_pairs(scratch, BACKWARD_BLOCK * pairs_up(p.dim));
    room.copied_values = take_pairs(scratch, BACKWARD_BLOCK * pairs_up(p.value_dim));
    for (Pair*& keys : room.keys_twice) keys = take_pairs(scratch, height_up(p.dim) * BACKWARD_BLOCK);
    for (float*& weights : room.weights) weights = take(scratch, BACKWARD_BLOCK * TILE);
    for (float*& gradients : room.gradients) gradients = take(scratch, BACKWARD_BLOCK * TILE);
    room.slopes = take(scratch, BACKWARD_BLOCK * TILE);
    room.masks = mask_scratch(take(scratch, MASK_SCRATCH_FLOATS));
    const TileRegisters registers;
    const int64_t step = pair_tiles_at_once(p) * TILE;
    for (int64_t row = task.row_start; row < task.row_stop; row += step) {
        PairBackwardTile tiles[MOST_TILES];
        float *memory = scratch, factors[TILE];
        int64_t count = 0;
        const int64_t stop = smaller(row + step, task.row_stop);
        for (int64_t start = row; start < stop; start += TILE, count++) {
            describe_rows(p, task.batch, task.kv_head, start, stop, tiles[count].rows);
            if (task.masks) tiles[count].rows.masks = task.masks + (start - task.row_start) / TILE * masks_size(p);
            prepare_pairs(p, task.batch, tiles[count], memory);
        }
        backward_tiles(p, task, tiles, count, room, sums);
        for (float& factor : factors) factor = p.scale;
        for (int64_t n = 0; n < count; n++)
            write_query_gradient<BFloat16>(p, task.batch, tiles[n], height_up(p.dim), factors);
    }
}

}  // namespace clearhead::ISA
