#include "driver_shared.h"

namespace clearhead {
namespace {

constexpr int64_t TASK_FLOATS = 128 * 1024;  // queries and outputs of a task, which must stay in the cache
constexpr int64_t FEWEST_KEYS = 256;         // of one chunk of a head's keys in decoding
constexpr int64_t MOST_KEYS = 2048;          // of one chunk, so that sums are short

// The number of rows of a task: equal numbers of whole tiles, and several tasks for each thread.
int64_t rows_of_task(const Kernels& kernels, const Problem& p) {
    const int64_t tile = kernels.tile_rows, rows = p.folded_rows(), heads = p.batch * p.kv_heads;
    const int64_t most = larger(1, smaller(MOST_TILES, TASK_FLOATS / (tile * (p.dim + p.value_dim + 1))));
    const int64_t chunks = p.threads > 1 ? divide_up(TASKS_PER_THREAD * p.threads, heads) : 1;
    return round_up(divide_up(rows, larger(chunks, divide_up(rows, most * tile))), tile);
}

// The largest number of chunks of `step` rows to compute together; 0 if their masks do not fit. May reduce `step`.
int64_t chunks_at_once(const SharedMasks& masks, int64_t& step) {
    if (masks.heads == 1) return 0;
    const Problem& p = masks.p;
    const int64_t tile = masks.kernels.tile_rows, rows = p.folded_rows();
    const int64_t fitting = KEPT_FLOATS / masks.size(tile) * tile;
    if (fitting == 0) return 0;
    if (fitting < step) step = round_up(divide_up(rows, divide_up(rows, fitting)), tile);
    const int64_t most = MASK_FLOATS * p.threads / masks.size(step);
    const int64_t needed = masks.heads % p.threads == 0 ? 1 : divide_up(TASKS_PER_THREAD * p.threads, masks.heads);
    if (needed <= most) return most;
    return needed * masks.size(step) <= KEPT_FLOATS ? needed : 0;
}

// Computes chunks of rows of all heads in turns, each with its packed masks.
void run_in_turns(SharedMasks& masks, int64_t step, int64_t most) {
    const Kernels& kernels = masks.kernels;
    const Problem& p = masks.p;
    const int64_t rows = p.folded_rows(), of_plane = divide_up(rows, step), chunks = of_plane * masks.planes;
    const int64_t turn = divide_up(chunks, divide_up(chunks, most)), size = masks.size(step);
    for (int64_t first = 0; first < chunks; first += turn) {
        const int64_t count = smaller(turn, chunks - first);
        const auto place = [&](int64_t chunk) {
            chunk += first;
            return std::pair<int64_t, int64_t>(chunk % masks.planes, (of_plane - 1 - chunk / masks.planes) * step);
        };
        masks.pack(count, step, place);
        parallel_for(count * masks.heads, p.threads, kernels.forward_scratch(p, step), [&](int64_t index, float* scratch) {
            const int64_t chunk = index / masks.heads, head = index % masks.heads;
            const auto [plane, start] = place(chunk);
            Task task = task_of(p, head, start, smaller(start + step, rows), masks.memory + chunk * size);
            task.batch = masks.batch(plane, head);
            kernels.forward[p.type](p, task, scratch);
        });
    }
}

// With few rows, reading keys and values takes most of the time, so all threads read.
void run_decoding(const Kernels& kernels, const Problem& p) {
    const int64_t heads = p.batch * p.kv_heads, size = kernels.partial_size(p), floats = kernels.decode_scratch(p);
    const bool busy = heads % p.threads == 0 || heads >= 2 * TASKS_PER_THREAD * p.threads;
    const int64_t most = larger(1, divide_up(p.keys, FEWEST_KEYS)), least = divide_up(p.keys, MOST_KEYS);
    const int64_t chunks = larger(least, smaller(most, busy ? 1 : divide_up(TASKS_PER_THREAD * p.threads, heads)));
    const int64_t step = divide_up(p.keys, chunks);
    const auto decode = [&](int64_t head, int64_t start, float* partial, float* scratch) {
        Task task = task_of(p, head, 0, 0);
        task.key_start = start, task.key_stop = smaller(start + step, p.keys);
        kernels.decode[p.type](p, task, partial, scratch);
    };
    const auto merge = [&](int64_t head, float* partials) {
        kernels.merge[p.type](p, head / p.kv_heads, head % p.kv_heads, partials, chunks);
    };
    if (chunks == 1)
        return parallel_for(heads, p.threads, floats + size, [&](int64_t head, float* memory) {
            decode(head, 0, memory, memory + size);
            merge(head, memory);
        });
    const std::unique_ptr<float[]> partials(new float[static_cast<size_t>(heads * chunks * size)]);
    parallel_for(heads * chunks, p.threads, floats, [&](int64_t index, float* memory) {
        decode(index / chunks, index % chunks * step, partials.get() + index * size, memory);
    });
    for (int64_t head = 0; head < heads; head++) merge(head, partials.get() + head * chunks * size);
}

void compute_forward(const Kernels& kernels, const Problem& p) {
    const int64_t rows = p.folded_rows(), heads = p.batch * p.kv_heads;
    if (rows == 0 || heads == 0) return;
    if (p.table_buckets) return run_forward_with_tables(kernels, p);
    if (decodes(kernels, p)) return run_decoding(kernels, p);
    SharedMasks masks(kernels, p);
    int64_t shared_step = rows_of_task(kernels, p);
    const int64_t step = shared_step, chunks = divide_up(rows, step), most = chunks_at_once(masks, shared_step);
    if (most > 0) return run_in_turns(masks, shared_step, most);
    parallel_for(heads * chunks, p.threads, kernels.forward_scratch(p, step), [&](int64_t index, float* memory) {
        // Heads come in order, so that keys stay in the cache. Under a causal mask later rows take longest, so they come first.
        const int64_t head = index / chunks, start = (chunks - 1 - index % chunks) * step;
        kernels.forward[p.type](p, task_of(p, head, start, smaller(start + step, rows)), memory);
    });
}

}  // namespace

int64_t scratch_of_head(const Kernels& kernels, const Problem& p) {
    return kernels.forward_scratch(p, rows_of_task(kernels, p));
}

void forward_of_head(const Kernels& kernels, const Problem& p, int64_t head, float* memory) {
    const int64_t rows = p.folded_rows(), step = rows_of_task(kernels, p);
    for (int64_t start = 0; start < rows; start += step)
        kernels.forward[p.type](p, task_of(p, head, start, smaller(start + step, rows)), memory);
}

void run_forward(const Kernels& kernels, const Problem& p) {
    if (p.sequences && p.table_buckets) return run_forward_with_tables(kernels, p);
    if (p.sequences) return run_each_sequence(run_forward, kernels, p);
    if (p.selected.data) return run_gathered_forward(kernels, p);
    compute_forward(kernels, p);
    const int64_t bytes = p.wide_output ? 4 : p.bytes();
    if (!may_hide_altogether(p) || !has_nan(p, p.output, p.heads, p.rows, p.value_dim, bytes)) return;
    const Isolated isolated(p);
    if (isolated.any()) compute_forward(kernels, isolated.problem());
}

}  // namespace clearhead
