#include <stdlib.h>
#include <string.h>

#include <utility>

#include "coverage.h"
#include "driver.h"
#include "driver_shared.h"
#include "key_parts.h"

namespace clearhead {
namespace {

constexpr int64_t KEYS_OF_PART = 1024;  // of a backward pass in parts of the keys
constexpr int64_t TILES_OF_RUN = 128;   // whose sums over rows are added up before they go to a total,
constexpr int64_t ITEMS_OF_RUN = 64;    // or items of a batch, where they share a bias

void add(const float* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

// Into how many parts, each with sums of its own, the rows of a key/value head are cut so that no thread is idle.
int64_t parts_of_backward(const Kernels& kernels, const Problem& p, int64_t heads, int64_t threads) {
    const int64_t most = divide_up(p.folded_rows(), kernels.tile_rows);
    if (threads == 1 || heads % threads == 0 || heads >= TASKS_PER_THREAD * threads) return 1;
    const int64_t wanted = divide_up(TASKS_PER_THREAD * threads, heads);
    return wanted < most ? wanted : most > 0 ? most : 1;
}

// The masks of all rows, for backward passes, which keep to a head from its first row to its last; none if too large.
class WholeMasks {
  public:
    WholeMasks(const Kernels& kernels, const Problem& p, int64_t threads) : masks_(kernels, p) {
        const int64_t size = masks_.size(p.folded_rows()), most = MASK_FLOATS * threads;
        if (masks_.heads == 1 || masks_.planes * size > (most > KEPT_FLOATS ? most : KEPT_FLOATS)) return;
        memory_ = mask_scratch.take(masks_.planes * size);
        const auto place = [](int64_t plane) { return std::pair<int64_t, int64_t>(plane, 0); };
        if (memory_ && !masks_.pack(masks_.planes, p.folded_rows(), threads, memory_, place)) memory_ = nullptr;
    }
    ~WholeMasks() { mask_scratch.give_back(); }
    WholeMasks(const WholeMasks&) = delete;

    const float* of(int64_t batch, int64_t row_start) const {
        const int64_t plane = masks_.planes == 1 ? 0 : batch;
        return memory_ ? memory_ + plane * masks_.size(masks_.p.folded_rows()) + masks_.size(row_start) : nullptr;
    }

  private:
    const SharedMasks masks_;
    float* memory_ = nullptr;
};

// Adds the sums of a run to a total, and begins the next.
void end_run(float* sums, int64_t count, float* total) {
    add(sums, count, total);
    memset(sums, 0, static_cast<size_t>(count) * sizeof(float));
}

// Rows whose sums dk and dv are added up before they go to a total.
int64_t rows_of_run(const Kernels& kernels, const Problem& p) {
    return run_length(divide_up(p.folded_rows(), kernels.tile_rows), TILES_OF_RUN) * kernels.tile_rows;
}

// The backward pass of some rows run by run; behind the sums of a run, which are zero, there are those of the runs before.
void backward_in_runs(const Kernels& kernels, const Problem& p, const WholeMasks& masks, Task task, float* sums,
                      float* scratch) {
    const int64_t run = rows_of_run(kernels, p), size = kernels.sums_size(p), first = task.row_start, last = task.row_stop;
    for (int64_t start = first; start < last; start += run) {
        if (start > first) end_run(sums, size, sums + size);
        task.row_start = start, task.row_stop = start + run < last ? start + run : last;
        task.masks = masks.of(task.batch, start);
        kernels.backward(p, task, sums, scratch);
    }
}

// The backward pass of `heads` key/value heads, counted through the batch, from the first one on.
bool run_backward_of(const Kernels& kernels, const Problem& p, const WholeMasks& masks, int64_t first, int64_t heads,
                     int64_t threads) {
    const int64_t rows = p.folded_rows(), parts = parts_of_backward(kernels, p, heads, threads);
    const int64_t step = divide_up(divide_up(rows, parts), kernels.tile_rows) * kernels.tile_rows;
    const int64_t levels = step > rows_of_run(kernels, p) ? 2 : 1;
    const int64_t floats = kernels.backward_scratch(p, step), size = levels * kernels.sums_size(p);
    const size_t bytes = static_cast<size_t>(size) * sizeof(float);
    if (parts == 1)
        return parallel_for(heads, threads, floats + size + 16, [&](int64_t index, float* memory) {
            const int64_t batch = (first + index) / p.kv_heads, head = (first + index) % p.kv_heads;
            float* sums = memory + divide_up(floats, 16) * 16;
            memset(sums, 0, bytes);
            backward_in_runs(kernels, p, masks, {batch, head, 0, rows, 0, p.keys, nullptr}, sums, memory);
            kernels.write_sums(p, batch, head, sums, levels);
        });
    float* all = static_cast<float*>(calloc(static_cast<size_t>(heads * parts), bytes));
    if (!all) return bytes == 0;
    bool enough = parallel_for(heads * parts, threads, floats, [&](int64_t index, float* memory) {
        const int64_t head = first + index % heads, part = parts - 1 - index / heads, start = part * step;
        const int64_t stop = start + step < rows ? start + step : rows;
        backward_in_runs(kernels, p, masks, {head / p.kv_heads, head % p.kv_heads, start, stop, 0, p.keys, nullptr},
                         all + (index % heads * parts + part) * size, memory);
    });
    enough = enough && parallel_for(heads, threads, 16, [&](int64_t index, float*) {
                 const int64_t head = first + index;
                 kernels.write_sums(p, head / p.kv_heads, head % p.kv_heads, all + index * parts * size, parts * levels);
             });
    free(all);
    return enough;
}

// Whether a tile holds all rows of a head, the keys are many, and parts of the keys can be problems of their own.
bool goes_by_keys(const Kernels& kernels, const Problem& p) {
    const bool simple = p.type == Type::float32 && !p.drop_below && !p.first && !p.bias_gradient.data;
    const bool whole = p.group() == 1 || p.lse_head == p.rows;  // a part's numbers per row lie side by side
    return simple && whole && p.folded_rows() <= kernels.tile_rows && p.keys >= 4 * KEYS_OF_PART;
}

bool run_backward_by_keys(const Kernels& kernels, const Problem& p, int64_t threads) {
    const int64_t heads = p.batch * p.kv_heads, rows = p.folded_rows(), parts = divide_up(p.keys, KEYS_OF_PART);
    const int64_t size = rows * (p.dim + 1), floats = divide_up(kernels.backward_scratch(p, rows), 16) * 16;
    Problem longest = p;
    longest.keys = KEYS_OF_PART;
    const int64_t sums_size = kernels.sums_size(longest);
    float* found = static_cast<float*>(malloc(static_cast<size_t>(heads * parts * size + 1) * sizeof(float)));
    HeavyKey* heavy_keys =
        static_cast<HeavyKey*>(malloc(static_cast<size_t>(heads * parts * rows + 1) * sizeof(HeavyKey)));
    bool enough = found && heavy_keys;
    enough = enough && parallel_for(heads * parts, threads, floats + sums_size, [&](int64_t index, float* memory) {
        const int64_t head = index / parts, start = index % parts * KEYS_OF_PART;
        const int64_t stop = start + KEYS_OF_PART < p.keys ? start + KEYS_OF_PART : p.keys;
        const Problem part = part_of_keys(p, head / p.kv_heads, head % p.kv_heads, start, stop, found + index * size,
                                          heavy_keys + index * rows);
        float* sums = memory + floats;
        memset(sums, 0, static_cast<size_t>(sums_size) * sizeof(float));
        kernels.backward(part, {0, 0, 0, rows, 0, part.keys, nullptr}, sums, memory);
        kernels.write_sums(part, 0, 0, sums, 1);
    });
    for (int64_t head = 0; enough && head < heads; head++)
        join_parts(p, head / p.kv_heads, head % p.kv_heads, found + head * parts * size, parts, size,
                   heavy_keys + head * parts * rows, KEYS_OF_PART);
    free(found);
    free(heavy_keys);
    return enough;
}

bool compute_backward(const Kernels& kernels, const Problem& problem, int64_t threads) {
    Problem p = problem;
    p.few = decodes(kernels, p);
    const int64_t heads = p.batch * p.kv_heads;
    if (heads == 0) return true;
    if (goes_by_keys(kernels, p)) return run_backward_by_keys(kernels, p, threads);
    const WholeMasks masks(kernels, p, threads);
    if (!p.bias_gradient.data || p.bias_gradient.batch || p.batch < 2)
        return run_backward_of(kernels, p, masks, 0, heads, threads);
    // Batch items that add to the same gradient of a bias do so one after the other.
    const int64_t run = run_length(p.batch, ITEMS_OF_RUN), count = p.heads * p.rows * p.keys;
    float *sums = static_cast<float*>(p.bias_gradient.data), *total = nullptr;
    if (p.batch > run) total = static_cast<float*>(calloc(static_cast<size_t>(count), sizeof(float)));
    bool enough = p.batch <= run || total || count == 0;
    for (int64_t item = 0; enough && item < p.batch; item++) {
        if (item > 0 && item % run == 0) end_run(sums, count, total);
        enough = run_backward_of(kernels, p, masks, item * p.kv_heads, p.kv_heads, threads);
    }
    if (total) add(total, count, sums);
    free(total);
    return enough;
}

void clear_bias_gradient(const Problem& p) {
    if (!p.bias_gradient.data) return;
    const int64_t count = (p.bias_gradient.batch ? p.batch : 1) * p.heads * p.rows * p.keys;
    memset(p.bias_gradient.data, 0, static_cast<size_t>(count) * sizeof(float));
}

}  // namespace

bool run_backward(const Kernels& kernels, const Problem& p, int64_t threads) {
    if (!compute_backward(kernels, p, threads)) return false;
    if (!may_hide_altogether(p)) return true;
    const View corrections = {p.correction, p.lse_batch, p.lse_head, 1, 1};
    const bool any = has_nan(p, corrections, p.heads, p.rows, 1, 4, threads) ||
                     has_nan(p, p.query_gradient, p.heads, p.rows, p.dim, p.bytes(), threads) ||
                     has_nan(p, p.key_gradient, p.kv_heads, p.keys, p.dim, p.bytes(), threads) ||
                     has_nan(p, p.value_gradient, p.kv_heads, p.keys, p.value_dim, p.bytes(), threads);
    if (!any) return true;
    const Isolated isolated(p);
    if (!isolated.enough_memory()) return false;
    if (!isolated.any()) return true;
    clear_bias_gradient(p);
    if (!compute_backward(kernels, isolated.problem(), threads)) return false;
    isolated.clear_gradients();
    return true;
}

}  // namespace clearhead
