#include <stdlib.h>

#include <utility>

#include "coverage.h"
#include "driver.h"
#include "driver_shared.h"

namespace clearhead {
namespace {

constexpr int64_t TASK_FLOATS = 128 * 1024;  // queries and outputs of a task, which have to stay in the cache
constexpr int64_t FEWEST_KEYS = 256;         // of one part of a head that is decoded
constexpr int64_t MOST_KEYS = 2048;          // of the same, so that no sum is long

// How many rows a task takes: whole tiles, equally many in each, few enough for every thread to get several tasks.
int64_t rows_of_task(const Kernels& kernels, const Problem& p, int64_t threads) {
    const int64_t tile = kernels.tile_rows, rows = p.folded_rows(), heads = p.batch * p.kv_heads;
    int64_t most = TASK_FLOATS / (tile * (p.dim + p.value_dim + 1));
    most = most < 1 ? 1 : most > MOST_TILES ? MOST_TILES : most;
    const int64_t parts = threads > 1 ? divide_up(TASKS_PER_THREAD * threads, heads) : 1;
    const int64_t fitting = divide_up(rows, most * tile);
    const int64_t count = parts < fitting ? fitting : parts;
    return divide_up(divide_up(rows, count), tile) * tile;
}

// How many runs of `step` rows, at most, are at work at once, enough for all threads; 0 if their masks do not fit.
// `step` may shrink.
int64_t runs_at_once(const SharedMasks& masks, int64_t& step, int64_t threads) {
    if (masks.heads == 1) return 0;
    const int64_t tile = masks.kernels.tile_rows, rows = masks.p.folded_rows();
    const int64_t fitting = KEPT_FLOATS / masks.size(tile) * tile;
    if (fitting == 0) return 0;
    if (fitting < step) step = divide_up(divide_up(rows, divide_up(rows, fitting)), tile) * tile;
    const int64_t most = MASK_FLOATS * threads / masks.size(step);
    const int64_t needed = masks.heads % threads == 0 ? 1 : divide_up(TASKS_PER_THREAD * threads, masks.heads);
    if (needed <= most) return most;
    return needed * masks.size(step) <= KEPT_FLOATS ? needed : 0;
}

// Runs of rows of all heads one after the other, so that only their masks are packed at a time.
bool run_in_turns(const SharedMasks& masks, int64_t step, int64_t most, int64_t threads) {
    const Kernels& kernels = masks.kernels;
    const Problem& p = masks.p;
    const int64_t rows = p.folded_rows(), parts = divide_up(rows, step), runs = parts * masks.planes;
    const int64_t turn = divide_up(runs, divide_up(runs, most)), size = masks.size(step);
    float* memory = mask_scratch.take(turn * size);
    bool enough = memory != nullptr;
    for (int64_t first = 0; enough && first < runs; first += turn) {
        const int64_t count = turn < runs - first ? turn : runs - first;
        const auto place = [&](int64_t run) {
            run += first;
            return std::pair<int64_t, int64_t>(run % masks.planes, (parts - 1 - run / masks.planes) * step);
        };
        enough = masks.pack(count, step, threads, memory, place);
        const int64_t floats = kernels.forward_scratch(p, step);
        enough = enough && parallel_for(count * masks.heads, threads, floats, [&](int64_t index, float* scratch) {
                     const int64_t run = index / masks.heads, head = index % masks.heads;
                     const auto [plane, start] = place(run);
                     const int64_t stop = start + step < rows ? start + step : rows;
                     const int64_t batch = masks.batch(plane, head);
                     kernels.forward(p, {batch, head % p.kv_heads, start, stop, 0, p.keys, memory + run * size},
                                     scratch);
                 });
    }
    mask_scratch.give_back();
    return enough;
}

// Few rows: reading keys and values is what takes time, and all threads read.
bool run_decoding(const Kernels& kernels, const Problem& p, int64_t threads) {
    const int64_t heads = p.batch * p.kv_heads, size = kernels.partial_size(p), floats = kernels.decode_scratch(p);
    int64_t parts = heads % threads == 0 || heads >= 2 * TASKS_PER_THREAD * threads
                        ? 1
                        : divide_up(TASKS_PER_THREAD * threads, heads);
    const int64_t most = divide_up(p.keys, FEWEST_KEYS), least = divide_up(p.keys, MOST_KEYS);
    parts = parts < least ? least : parts < most ? parts : most > 0 ? most : 1;
    const int64_t step = divide_up(p.keys, parts);
    if (parts == 1)
        return parallel_for(heads, threads, floats + size, [&](int64_t head, float* memory) {
            kernels.decode(p, {head / p.kv_heads, head % p.kv_heads, 0, 0, 0, p.keys, nullptr}, memory, memory + size);
            kernels.merge(p, head / p.kv_heads, head % p.kv_heads, memory, 1);
        });
    float* partials = static_cast<float*>(malloc(static_cast<size_t>(heads * parts * size) * sizeof(float)));
    if (!partials) return false;
    const bool enough = parallel_for(heads * parts, threads, floats, [&](int64_t index, float* memory) {
        const int64_t head = index / parts, start = index % parts * step;
        const int64_t stop = start + step < p.keys ? start + step : p.keys;
        kernels.decode(p, {head / p.kv_heads, head % p.kv_heads, 0, 0, start, stop, nullptr}, partials + index * size,
                       memory);
    });
    for (int64_t head = 0; enough && head < heads; head++)
        kernels.merge(p, head / p.kv_heads, head % p.kv_heads, partials + head * parts * size, parts);
    free(partials);
    return enough;
}

bool compute_forward(const Kernels& kernels, const Problem& p, int64_t threads) {
    const int64_t rows = p.folded_rows(), heads = p.batch * p.kv_heads;
    if (rows == 0 || heads == 0) return true;
    if (decodes(kernels, p)) return run_decoding(kernels, p, threads);
    const SharedMasks masks(kernels, p);
    int64_t shared_step = rows_of_task(kernels, p, threads);
    const int64_t step = shared_step, parts = divide_up(rows, step), most = runs_at_once(masks, shared_step, threads);
    if (most > 0) return run_in_turns(masks, shared_step, most, threads);
    return parallel_for(heads * parts, threads, kernels.forward_scratch(p, step), [&](int64_t index, float* memory) {
        // One head after the other, so that its keys stay in the cache; later rows first: under a causal mask they take longest.
        const int64_t head = index / parts, start = (parts - 1 - index % parts) * step;
        const int64_t stop = start + step < rows ? start + step : rows;
        kernels.forward(p, {head / p.kv_heads, head % p.kv_heads, start, stop, 0, p.keys, nullptr}, memory);
    });
}

}  // namespace

bool run_forward(const Kernels& kernels, const Problem& p, int64_t threads) {
    if (!compute_forward(kernels, p, threads)) return false;
    const int64_t bytes = p.wide_output ? 4 : p.bytes();
    if (!may_hide_altogether(p) || !has_nan(p, p.output, p.heads, p.rows, p.value_dim, bytes, threads)) return true;
    const Isolated isolated(p);
    if (!isolated.enough_memory()) return false;
    return !isolated.any() || compute_forward(kernels, isolated.problem(), threads);
}

}  // namespace clearhead
