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

// The number of chunks of a head's rows, each with separate sums, that keeps all threads busy.
int64_t parts_of_backward(const Kernels& kernels, const Problem& p, int64_t heads) {
    if (p.threads == 1 || heads % p.threads == 0 || heads >= TASKS_PER_THREAD * p.threads) return 1;
    const int64_t tiles = larger(1, divide_up(p.folded_rows(), kernels.tile_rows));
    return smaller(tiles, divide_up(TASKS_PER_THREAD * p.threads, heads));
}

// The packed masks of all rows, or none if they are too large. A backward pass computes all rows of a head in turn.
class WholeMasks {
  public:
    WholeMasks(const Kernels& kernels, const Problem& p) : masks_(kernels, p) {
        const int64_t size = masks_.size(p.folded_rows());
        if (masks_.heads == 1 || masks_.planes * size > larger(KEPT_FLOATS, MASK_FLOATS * p.threads)) return;
        memory_ = mask_scratch.take(masks_.planes * size);
        const auto place = [](int64_t plane) { return std::pair<int64_t, int64_t>(plane, 0); };
        if (memory_) masks_.pack(masks_.planes, p.folded_rows(), memory_, place);
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

// The backward pass of some rows, run by run. `sums` holds zeros, and behind them the sums of earlier runs.
void backward_in_runs(const Kernels& kernels, const Problem& p, const WholeMasks& masks, Task task, float* sums,
                      float* scratch) {
    const int64_t run = rows_of_run(kernels, p), size = kernels.sums_size(p), first = task.row_start, last = task.row_stop;
    for (int64_t start = first; start < last; start += run) {
        if (start > first) end_run(sums, size, sums + size);
        task.row_start = start, task.row_stop = smaller(start + run, last);
        task.masks = masks.of(task.batch, start);
        kernels.backward[p.type](p, task, sums, scratch);
    }
}

// The backward pass of the key/value heads [first, first + heads), which count through the batch.
void run_backward_of(const Kernels& kernels, const Problem& p, const WholeMasks& masks, int64_t first, int64_t heads) {
    const int64_t rows = p.folded_rows(), parts = parts_of_backward(kernels, p, heads);
    const int64_t step = round_up(divide_up(rows, parts), kernels.tile_rows);
    const int64_t levels = step > rows_of_run(kernels, p) ? 2 : 1;
    const int64_t floats = round_up(kernels.backward_scratch(p, step), 16), size = levels * kernels.sums_size(p);
    const auto write_sums = [&](int64_t head, const float* sums) {
        kernels.write_sums[p.type](p, head / p.kv_heads, head % p.kv_heads, sums, parts * levels);
    };
    if (parts == 1)
        return parallel_for(heads, p.threads, floats + size, [&](int64_t index, float* memory) {
            float* sums = memory + floats;
            memset(sums, 0, static_cast<size_t>(size) * sizeof(float));
            backward_in_runs(kernels, p, masks, task_of(p, first + index, 0, rows), sums, memory);
            write_sums(first + index, sums);
        });
    const auto all = zeros<float>(heads * parts * size);
    parallel_for(heads * parts, p.threads, floats, [&](int64_t index, float* memory) {
        const int64_t head = index % heads, part = parts - 1 - index / heads, start = part * step;
        backward_in_runs(kernels, p, masks, task_of(p, first + head, start, smaller(start + step, rows)),
                         all.get() + (head * parts + part) * size, memory);
    });
    parallel_for(heads, p.threads, 16, [&](int64_t index, float*) {
        write_sums(first + index, all.get() + index * parts * size);
    });
}

// Whether the call has few rows and many keys, so that chunks of the keys can be separate problems.
bool goes_by_keys(const Kernels& kernels, const Problem& p) {
    const bool simple = p.type == Type::float32 && !p.drop_below && !p.first && !p.bias_gradient.data;
    const bool whole = p.group() == 1 || p.lse_head == p.rows;  // numbers per row are contiguous in a chunk
    return simple && whole && p.folded_rows() <= kernels.tile_rows && p.keys >= 4 * KEYS_OF_PART;
}

void run_backward_by_keys(const Kernels& kernels, const Problem& p) {
    const int64_t heads = p.batch * p.kv_heads, rows = p.folded_rows(), parts = divide_up(p.keys, KEYS_OF_PART);
    const int64_t size = rows * (p.dim + 1), floats = round_up(kernels.backward_scratch(p, rows), 16);
    Problem longest = p;
    longest.keys = KEYS_OF_PART;
    const int64_t sums_size = kernels.sums_size(longest);
    const std::unique_ptr<float[]> of_queries(new float[static_cast<size_t>(heads * parts * size)]);
    const std::unique_ptr<HeavyKey[]> heavy_keys(new HeavyKey[static_cast<size_t>(heads * parts * rows)]);
    parallel_for(heads * parts, p.threads, floats + sums_size, [&](int64_t index, float* memory) {
        const int64_t head = index / parts, start = index % parts * KEYS_OF_PART;
        const int64_t stop = smaller(start + KEYS_OF_PART, p.keys);
        const Problem part = part_of_keys(p, head / p.kv_heads, head % p.kv_heads, start, stop,
                                          of_queries.get() + index * size, heavy_keys.get() + index * rows);
        float* sums = memory + floats;
        memset(sums, 0, static_cast<size_t>(sums_size) * sizeof(float));
        kernels.backward[p.type](part, task_of(part, 0, 0, rows), sums, memory);
        kernels.write_sums[p.type](part, 0, 0, sums, 1);
    });
    for (int64_t head = 0; head < heads; head++)
        join_parts(p, head / p.kv_heads, head % p.kv_heads, of_queries.get() + head * parts * size, parts, size,
                   heavy_keys.get() + head * parts * rows, KEYS_OF_PART);
}

void compute_backward(const Kernels& kernels, const Problem& problem) {
    Problem p = problem;
    p.few = decodes(kernels, p);
    const int64_t heads = p.batch * p.kv_heads;
    if (heads == 0) return;
    if (goes_by_keys(kernels, p)) return run_backward_by_keys(kernels, p);
    const WholeMasks masks(kernels, p);
    if (!p.bias_gradient.data || p.bias_gradient.batch || p.batch < 2)
        return run_backward_of(kernels, p, masks, 0, heads);
    // Batch items add to a shared gradient of a bias in turn.
    const int64_t run = run_length(p.batch, ITEMS_OF_RUN), count = p.heads * p.rows * p.keys;
    const auto total = zeros<float>(p.batch > run ? count : 0);
    float* sums = static_cast<float*>(p.bias_gradient.data);
    for (int64_t item = 0; item < p.batch; item++) {
        if (item > 0 && item % run == 0) end_run(sums, count, total.get());
        run_backward_of(kernels, p, masks, item * p.kv_heads, p.kv_heads);
    }
    if (p.batch > run) add(total.get(), count, sums);
}

void clear_bias_gradient(const Problem& p) {
    if (!p.bias_gradient.data) return;
    const int64_t count = (p.bias_gradient.batch ? p.batch : 1) * p.heads * p.rows * p.keys;
    memset(p.bias_gradient.data, 0, static_cast<size_t>(count) * sizeof(float));
}

bool any_gradient_has_nan(const Problem& p) {
    const View corrections = {p.correction, p.lse_batch, p.lse_head, 1, 1};
    return has_nan(p, corrections, p.heads, p.rows, 1, 4) ||
           has_nan(p, p.query_gradient, p.heads, p.rows, p.dim, p.bytes()) ||
           has_nan(p, p.key_gradient, p.kv_heads, p.keys, p.dim, p.bytes()) ||
           has_nan(p, p.value_gradient, p.kv_heads, p.keys, p.value_dim, p.bytes());
}

}  // namespace

void run_backward(const Kernels& kernels, const Problem& p) {
    if (p.sequences) return run_each_sequence(run_backward, kernels, p);
    compute_backward(kernels, p);
    if (!may_hide_altogether(p) || !any_gradient_has_nan(p)) return;
    const Isolated isolated(p);
    if (!isolated.any()) return;
    clear_bias_gradient(p);
    compute_backward(kernels, isolated.problem());
    isolated.clear_gradients();
}

}  // namespace clearhead
