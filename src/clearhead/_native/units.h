// The order of work in products of pairs. A unit is one tile of rows against a block of keys. A chunk is the keys that
// are packed together, for all tiles of a task. Chunks are the outer loop, then tiles, then blocks.
#pragma once
#include "pairs.h"
#include "tile_masks.h"

namespace clearhead::ISA {

constexpr int SIDES = 3;        // the current unit, the previous and the next may belong to different chunks
constexpr int PAIR_RUN = 1024;  // keys that are summed without a total: tile registers add to the sums there are

template <class SomeTile>
struct Unit {
    SomeTile* tile = nullptr;
    int64_t start = 0, count = 0, within = 0;  // keys; the number of keys of the chunk before it
    int side = 0, slot = 0;                    // which of several buffers
    TileMask mask = {};                        // valid until the next unit
    bool adjusted = false;                     // whether scores need more than a factor: a soft-cap or the mask
};

// Calls work(unit) for the units that are not fully masked, and before pass.pack(first key, number of keys, number with
// padding, side) for their chunks.
template <class SomeTile, class Pass, class Work>
INLINE void each_unit(const Problem& p, const Task& task, SomeTile* tiles, int64_t count, Pass& pass, const Work& work) {
    constexpr int64_t block = Pass::BLOCK_KEYS, chunk = Pass::CHUNK_KEYS;
    const KeyRange keys = visible_keys(p, tiles, count);
    Unit<SomeTile> unit;
    for (int64_t first = keys.start / block * block; first < keys.stop; first += chunk) {
        const int64_t present = smaller(chunk, p.keys - first), padded = round_up(present, KEY_STEP);
        bool packed = false;
        for (SomeTile* tile = tiles; tile < tiles + count; tile++) {
            const int64_t end = smaller(first + padded, round_up(tile->highest_last, KEY_STEP));
            int64_t start = larger(first, tile->lowest_first / KEY_STEP * KEY_STEP);
            for (int64_t stop; start < end; start = stop) {
                stop = smaller(start / block * block + block, end);
                by_vectors(tile->vectors, [&](auto vectors) {
                    unit.mask = tile_mask<vectors.value>(p, *tile, task.batch, start, stop, pass.masks);
                });
                if (unit.mask.form == MaskForm::nothing) continue;
                if (!packed) {
                    unit.side = (unit.side + 1) % SIDES, packed = true;
                    pass.pack(first, present, padded, unit.side);
                }
                unit.tile = tile, unit.slot = 1 - unit.slot;
                unit.start = start, unit.count = stop - start, unit.within = start - first;
                unit.adjusted = p.softcap != 0 || unit.mask.form != MaskForm::everything;
                work(unit);
            }
        }
    }
}

// Products beside the vector units, in the order in which they are due.
template <int COUNT>
struct DueProducts {
    Product products[COUNT] = {};

    void step_of_any() {
        for (Product& product : products)
            if (product.unfinished()) return step(product);
    }
    void finish_all() {
        for (Product& product : products) finish(product);
    }
};

// Runs a pass on its units. `pass` has the functions that are called here. It makes weights of one unit while products of
// its neighbours are due: first the sums of the unit before, then the scores of the next.
template <class SomeTile, class Pass>
static void run_units(const Problem& p, const Task& task, SomeTile* tiles, int64_t count, Pass& pass) {
    DueProducts<Pass::SUMS + Pass::SCORES> due;
    Unit<SomeTile> now;
    const auto weigh = [&] {
        if (now.tile) by_vectors(now.tile->vectors, [&](auto v) { pass.template weigh<v.value>(now, due); });
        due.finish_all();
        if (!now.tile) return;
        if (now.tile->summed + now.count > PAIR_RUN) end_run(*now.tile);
        now.tile->summed += now.count;
        pass.sums(now, due.products);
    };
    each_unit(p, task, tiles, count, pass, [&](const Unit<SomeTile>& next) {
        pass.scores(next, due.products + Pass::SUMS);
        weigh();
        now = next;
        if (!now.adjusted) return;
        by_vectors(now.tile->vectors, [&](auto v) {
            by_form(now.mask, [&](auto form) { pass.template adjust<v.value, form()>(now); });
        });
    });
    weigh();
    due.finish_all();
}

}  // namespace clearhead::ISA
