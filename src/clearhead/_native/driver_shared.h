// What the drivers of all passes share.
#pragma once
#include "parallel.h"
#include "problem.h"

namespace clearhead {

constexpr int64_t TASKS_PER_THREAD = 4;       // enough that the last ones to finish do not keep the others waiting
constexpr int64_t MASK_FLOATS = 1024 * 1024;  // packed at a time, for each thread
constexpr int64_t FEWEST_SCORES = 64 * 1024;  // of a head that make packing its mask worth while

// Whether rows are so few that a tile would be mostly empty.
bool decodes(const Kernels& kernels, const Problem& p);

// Whether any number of the rows is NaN; of 4 bytes each, or of the problem's type.
//
// What is hidden altogether has weights of zero, so that only NaN and infinity in it can change a result, which is NaN then.
// Such a call is repeated with zeros there; any other costs one scan of its results for NaN.
bool has_nan(const Problem& p, const View& view, int64_t heads, int64_t rows, int64_t columns, int64_t bytes,
             int64_t threads);

// Masks that several heads share: packed by tiles once, so that not every head has to do it.
struct SharedMasks {
    const Kernels& kernels;
    const Problem& p;
    int64_t planes, heads;  // how many there are, and how many heads share each; 1 if none do

    SharedMasks(const Kernels& of, const Problem& problem) : kernels(of), p(problem), planes(1), heads(1) {
        const bool any = p.visible.data || p.bias.data, per_head = p.visible.head || p.bias.head;
        if (!any || per_head || p.folded_rows() * p.keys < FEWEST_SCORES) return;
        if (p.visible.batch || p.bias.batch || (p.first && p.span_batch)) planes = p.batch;
        heads = p.batch * p.kv_heads / planes;
    }

    int64_t batch(int64_t plane, int64_t head) const { return planes == 1 ? head / p.kv_heads : plane; }
    // Of some rows of one plane.
    int64_t size(int64_t rows) const { return divide_up(rows, kernels.tile_rows) * kernels.masks_size(p); }

    // Packs `count` runs of `rows` rows of planes; place(index) says which plane and row the run begins at.
    template <class Place>
    bool pack(int64_t count, int64_t rows, int64_t threads, float* to, const Place& place) const {
        const int64_t tiles = divide_up(rows, kernels.tile_rows);
        return parallel_for(count * tiles, threads, 16, [&](int64_t index, float*) {
            const auto [plane, start] = place(index / tiles);
            const int64_t row = start + index % tiles * kernels.tile_rows;
            if (row < p.folded_rows()) kernels.pack_masks(p, plane, row, to + index * kernels.masks_size(p));
        });
    }
};

}  // namespace clearhead
