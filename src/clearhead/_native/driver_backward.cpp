#include "driver_shared.h"

namespace clearhead {
namespace {

constexpr int64_t KEYS_OF_CHUNK = 1024;  // of a backward pass in chunks of the keys
constexpr int64_t TILES_OF_RUN = 128;   // whose sums over rows are added up before they go to a total,
constexpr int64_t ITEMS_OF_RUN = 64;    // or items of a batch, where they share a bias

void add(const float* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

// The number of chunks of a head's rows, each with separate sums, that keeps all threads busy.
int64_t chunks_of_backward(const Kernels& kernels, const Problem& p, int64_t heads) {
    if (p.threads == 1 || heads % p.threads == 0 || heads >= TASKS_PER_THREAD * p.threads) return 1;
    const int64_t tiles = larger(1, divide_up(p.folded_rows(), kernels.tile_rows));
    return smaller(tiles, divide_up(TASKS_PER_THREAD * p.threads, heads));
}

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
void backward_in_runs(const Kernels& kernels, const Problem& p, const SharedMasks& masks, Task task, float* sums,
                      float* scratch) {
    const int64_t run = rows_of_run(kernels, p), size = kernels.sums_size(p), first = task.row_start, last = task.row_stop;
    for (int64_t start = first; start < last; start += run) {
        if (start > first) end_run(sums, size, sums + size);
        task.row_start = start, task.row_stop = smaller(start + run, last);
        const int64_t plane = masks.planes == 1 ? 0 : task.batch;
        if (masks.memory) task.masks = masks.memory + plane * masks.size(p.folded_rows()) + masks.size(start);
        kernels.backward[p.type](p, task, sums, scratch);
    }
}

// The sums of a head whose rows are computed in turn: those of a run, and behind them those of earlier runs.
int64_t levels_of_head(const Kernels& kernels, const Problem& p) {
    return p.folded_rows() > rows_of_run(kernels, p) ? 2 : 1;
}

void backward_of_whole_head(const Kernels& kernels, const Problem& p, const SharedMasks& masks, int64_t head,
                            float* memory) {
    const int64_t levels = levels_of_head(kernels, p), rows = p.folded_rows();
    float* sums = memory + round_up(kernels.backward_scratch(p, round_up(rows, kernels.tile_rows)), 16);
    memset(sums, 0, static_cast<size_t>(levels * kernels.sums_size(p)) * sizeof(float));
    backward_in_runs(kernels, p, masks, task_of(p, head, 0, rows), sums, memory);
    kernels.write_sums[p.type](p, head / p.kv_heads, head % p.kv_heads, sums, levels);
}

// The backward pass of the key/value heads [first, first + heads), which count through the batch.
void run_backward_of(const Kernels& kernels, const Problem& p, const SharedMasks& masks, int64_t first, int64_t heads) {
    const int64_t rows = p.folded_rows(), chunks = chunks_of_backward(kernels, p, heads);
    const int64_t step = round_up(divide_up(rows, chunks), kernels.tile_rows);
    const int64_t levels = step > rows_of_run(kernels, p) ? 2 : 1;
    const int64_t floats = round_up(kernels.backward_scratch(p, step), 16), size = levels * kernels.sums_size(p);
    const auto write_sums = [&](int64_t head, const float* sums) {
        kernels.write_sums[p.type](p, head / p.kv_heads, head % p.kv_heads, sums, chunks * levels);
    };
    if (chunks == 1)
        return parallel_for(heads, p.threads, scratch_of_backward(kernels, p), [&](int64_t index, float* memory) {
            backward_of_whole_head(kernels, p, masks, first + index, memory);
        });
    const auto all = zeros<float>(heads * chunks * size);
    parallel_for(heads * chunks, p.threads, floats, [&](int64_t index, float* memory) {
        const int64_t head = index % heads, chunk = chunks - 1 - index / heads, start = chunk * step;
        backward_in_runs(kernels, p, masks, task_of(p, first + head, start, smaller(start + step, rows)),
                         all.get() + (head * chunks + chunk) * size, memory);
    });
    parallel_for(heads, p.threads, 16, [&](int64_t index, float*) {
        write_sums(first + index, all.get() + index * chunks * size);
    });
}

// A backward pass of few rows in chunks of many keys. Each chunk has all rows, so the gradients of its keys and values are
// complete and are written from the cache. The gradients of the queries are added up.
//
// Some keys of one key/value head as a separate problem, in float32 without dropout, row ranges and a bias's gradient.
// It writes the gradients of the queries (folded rows × D) and then δ − dl to `of_queries`, and heavy keys.
Problem chunk_of_keys(const Problem& p, int64_t batch, int64_t kv_head, int64_t start, int64_t stop, float* of_queries,
                     HeavyKey* heavy_keys) {
    Problem chunk = part_of(p, batch, kv_head * p.group(), kv_head, 0, start);
    chunk.batch = chunk.kv_heads = 1, chunk.heads = p.group(), chunk.keys = stop - start;
    chunk.low -= start, chunk.high -= start, chunk.stop -= start;
    chunk.query_gradient = {of_queries, 0, p.rows * p.dim, p.dim, 1};
    chunk.correction = of_queries + p.folded_rows() * p.dim, chunk.heavy_keys = heavy_keys;
    return chunk;
}

// Adds up the results of `count` chunks of `keys` keys each. They lie `size` floats apart.
void join_chunks(const Problem& p, int64_t batch, int64_t kv_head, const float* of_queries, int64_t count,
                       int64_t size, const HeavyKey* heavy_keys, int64_t keys) {
    for (int64_t r = 0; r < p.folded_rows(); r++) {
        const int64_t head = kv_head * p.group() + r / p.rows, row = r % p.rows;
        float* to = p.query_gradient.at<float>(batch, head, row);
        for (int64_t d = 0; d < p.dim; d++) {
            double total = 0;
            for (int64_t n = 0; n < count; n++) total += of_queries[n * size + r * p.dim + d];
            to[d] = static_cast<float>(total);
        }
        p.correction[p.row_place(batch, head, row)] = of_queries[p.folded_rows() * p.dim + r];
        HeavyKey heavy = {0, -1, 1};
        for (int64_t n = 0; n < count; n++) {
            const HeavyKey& of_chunk = heavy_keys[n * p.folded_rows() + r];
            heavy.light_sum += of_chunk.light_sum;
            if (of_chunk.key >= 0) heavy.key = n * keys + of_chunk.key, heavy.slope = of_chunk.slope;
        }
        if (heavy.key < 0) continue;
        const double ds = p.sum_of_score_gradients(batch, head, row) - heavy.light_sum;
        const float factor = static_cast<float>(ds * heavy.slope * p.exact_scale);
        const float *query = p.query.at<float>(batch, head, row), *key = p.key.at<float>(batch, kv_head, heavy.key);
        float* of_key = p.key_gradient.at<float>(batch, kv_head, heavy.key);
        for (int64_t d = 0; d < p.dim; d++) to[d] += factor * key[d], of_key[d] += factor * query[d];
    }
}

// Whether the call has few rows and many keys, so that chunks of the keys can be separate problems.
bool goes_by_keys(const Kernels& kernels, const Problem& p) {
    const bool simple = p.type == Type::float32 && !p.drop_below && !p.last && !p.bias_gradient.data;
    const bool contiguous = p.group() == 1 || p.lse_head == p.rows;  // the numbers of the rows of a chunk
    return simple && contiguous && p.folded_rows() <= kernels.tile_rows && p.keys >= 4 * KEYS_OF_CHUNK;
}

void run_backward_by_keys(const Kernels& kernels, const Problem& p) {
    const int64_t heads = p.batch * p.kv_heads, rows = p.folded_rows(), chunks = divide_up(p.keys, KEYS_OF_CHUNK);
    const int64_t size = rows * (p.dim + 1), floats = round_up(kernels.backward_scratch(p, rows), 16);
    Problem longest = p;
    longest.keys = KEYS_OF_CHUNK;
    const int64_t sums_size = kernels.sums_size(longest);
    const std::unique_ptr<float[]> of_queries(new float[static_cast<size_t>(heads * chunks * size)]);
    const std::unique_ptr<HeavyKey[]> heavy_keys(new HeavyKey[static_cast<size_t>(heads * chunks * rows)]);
    parallel_for(heads * chunks, p.threads, floats + sums_size, [&](int64_t index, float* memory) {
        const int64_t head = index / chunks, start = index % chunks * KEYS_OF_CHUNK;
        const int64_t stop = smaller(start + KEYS_OF_CHUNK, p.keys);
        const Problem chunk = chunk_of_keys(p, head / p.kv_heads, head % p.kv_heads, start, stop,
                                          of_queries.get() + index * size, heavy_keys.get() + index * rows);
        float* sums = memory + floats;
        memset(sums, 0, static_cast<size_t>(sums_size) * sizeof(float));
        kernels.backward[p.type](chunk, task_of(chunk, 0, 0, rows), sums, memory);
        kernels.write_sums[p.type](chunk, 0, 0, sums, 1);
    });
    for (int64_t head = 0; head < heads; head++)
        join_chunks(p, head / p.kv_heads, head % p.kv_heads, of_queries.get() + head * chunks * size, chunks, size,
                   heavy_keys.get() + head * chunks * rows, KEYS_OF_CHUNK);
}

void compute_backward(const Kernels& kernels, const Problem& problem) {
    Problem p = problem;
    p.few = decodes(kernels, p);
    const int64_t heads = p.batch * p.kv_heads;
    if (heads == 0) return;
    if (p.table_buckets) return run_backward_with_tables(kernels, p);
    if (goes_by_keys(kernels, p)) return run_backward_by_keys(kernels, p);
    SharedMasks masks(kernels, p);  // packed at once, because a head's rows are computed in turn
    const int64_t rows = p.folded_rows(), most = larger(KEPT_FLOATS, MASK_FLOATS * p.threads);
    if (masks.heads > 1 && masks.planes * masks.size(rows) <= most)
        masks.pack(masks.planes, rows, [](int64_t plane) { return std::pair<int64_t, int64_t>(plane, 0); });
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
    if (p.table_buckets) clear_table_gradients(p);
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

int64_t scratch_of_backward(const Kernels& kernels, const Problem& p) {
    const int64_t rows = round_up(p.folded_rows(), kernels.tile_rows);
    return round_up(kernels.backward_scratch(p, rows), 16) + levels_of_head(kernels, p) * kernels.sums_size(p);
}

void backward_of_head(const Kernels& kernels, const Problem& p, int64_t head, float* memory) {
    backward_of_whole_head(kernels, p, SharedMasks(kernels, p, false), head, memory);
}

void run_backward(const Kernels& kernels, const Problem& p) {
    if (p.sequences && p.table_buckets) return run_backward_with_tables(kernels, p);
    if (p.sequences) return run_each_sequence(run_backward, kernels, p);
    if (p.selected.data) return run_gathered_backward(kernels, p);
    compute_backward(kernels, p);
    if (!may_hide_altogether(p) || !any_gradient_has_nan(p)) return;
    const Isolated isolated(p);
    if (!isolated.any()) return;
    clear_bias_gradient(p);
    compute_backward(kernels, isolated.problem());
    isolated.clear_gradients();
}

}  // namespace clearhead
