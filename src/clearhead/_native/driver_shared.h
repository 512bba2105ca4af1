// Common parts of the drivers of all passes.
#pragma once
#include "coverage.h"
#include "parallel.h"

namespace clearhead {

constexpr int64_t TASKS_PER_THREAD = 4;       // so many that threads finish at about the same time
constexpr int64_t MASK_FLOATS = 1024 * 1024;  // packed at a time, for each thread
constexpr int64_t FEWEST_SCORES = 64 * 1024;  // of a head from which packing its mask pays

// Rows of a key/value head against all keys. `head` counts through the batch.
inline Task task_of(const Problem& p, int64_t head, int64_t row_start, int64_t row_stop, const float* masks = nullptr) {
    return {head / p.kv_heads, head % p.kv_heads, row_start, row_stop, 0, p.keys, masks};
}

// Runs a pass on each packed sequence.
void run_each_sequence(void (*pass)(const Kernels&, const Problem&), const Kernels& kernels, const Problem& all);

// A packed sequence as a problem.
Problem sequence_of(const Problem& all, int64_t number, int64_t threads);

// A head, which counts through the batch, by one thread. Memory as the function before each says.
int64_t scratch_of_head(const Kernels& kernels, const Problem& p);
void forward_of_head(const Kernels& kernels, const Problem& p, int64_t head, float* memory);
int64_t scratch_of_backward(const Kernels& kernels, const Problem& p);
void backward_of_head(const Kernels& kernels, const Problem& p, int64_t head, float* memory);

// The passes of a problem whose bias comes from tables, a batch or packed sequences.
void run_forward_with_tables(const Kernels& kernels, const Problem& p);
void run_backward_with_tables(const Kernels& kernels, const Problem& p);
void clear_table_gradients(const Problem& p);

// The passes of a problem with selected keys.
void run_gathered_forward(const Kernels& kernels, const Problem& p);
void run_gathered_backward(const Kernels& kernels, const Problem& p);

// A problem from a row and a key of a batch item and head on. The caller sets its sizes and band.
Problem part_of(const Problem& all, int64_t batch, int64_t head, int64_t kv_head, int64_t row, int64_t key);

// Whether a tile would be mostly empty, so that `decode` is faster.
bool decodes(const Kernels& kernels, const Problem& p);

// Whether any number of the rows is NaN. Numbers have 4 bytes, or the problem's type.
//
// Fully masked rows, and keys that are masked for every row, have weights of zero. Only NaN and infinity in them can
// change a result, to NaN. Such a call is repeated with zeros in their place. Other calls cost one scan of the results.
bool has_nan(const Problem& p, const View& view, int64_t heads, int64_t rows, int64_t columns, int64_t bytes);

// Masks that several heads share. Their tiles are packed once for all heads.
struct SharedMasks {
    const Kernels& kernels;
    const Problem& p;
    int64_t planes = 1, heads = 1;  // the number of masks, and of heads that share each (1: not shared)
    float* memory = nullptr;        // the packed masks

    SharedMasks(const Kernels& of, const Problem& problem, bool share = true) : kernels(of), p(problem) {
        if (!share) return;
        const bool any = p.visible.data || p.bias.data, per_head = p.visible.head || p.bias.head;
        if (!any || per_head || p.folded_rows() * p.keys < FEWEST_SCORES) return;
        if (p.visible.batch || p.bias.batch || (p.last && p.range_batch)) planes = p.batch;
        heads = p.batch * p.kv_heads / planes;
    }
    ~SharedMasks() { mask_scratch.give_back(); }
    SharedMasks(const SharedMasks&) = delete;

    int64_t batch(int64_t plane, int64_t head) const { return planes == 1 ? head / p.kv_heads : plane; }
    // Floats of `rows` rows of one plane.
    int64_t size(int64_t rows) const { return divide_up(rows, kernels.tile_rows) * kernels.masks_size(p); }

    // Packs `count` chunks of `rows` rows. place(index) returns the plane and first row of a chunk.
    template <class Place>
    void pack(int64_t count, int64_t rows, const Place& place) {
        const int64_t tiles = divide_up(rows, kernels.tile_rows);
        memory = mask_scratch.take(count * size(rows));
        if (!memory) throw std::bad_alloc();
        parallel_for(count * tiles, p.threads, 16, [&](int64_t index, float*) {
            const auto [plane, start] = place(index / tiles);
            const int64_t row = start + index % tiles * kernels.tile_rows;
            if (row < p.folded_rows()) kernels.pack_masks(p, plane, row, memory + index * kernels.masks_size(p));
        });
    }
};

}  // namespace clearhead
