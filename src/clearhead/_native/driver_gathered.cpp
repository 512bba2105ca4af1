// Attention to selected keys. A row reads only the keys that it sees, so NaN in any other key reaches no result.
#include "driver_shared.h"

namespace clearhead {
namespace {

constexpr int64_t FEWEST_KEYS = 256;    // of one part of a row's keys
constexpr int64_t ROWS_OF_RUN = 128;    // whose sums dk and dv are added up before they go to a total
constexpr int64_t READS_OF_RUN = 4;     // of each key, if that is more

// Rows of few keys are many in a run: adding the sums of all keys to a total has to pay.
int64_t rows_of_run(const Problem& p) {
    return larger(ROWS_OF_RUN, READS_OF_RUN * p.keys / larger(1, p.most_selected()));
}

void add_up(const Kernels& kernels, const Problem& p, float* sums) {
    const int64_t size = kernels.sums_size(p);
    for (int64_t i = 0; i < size; i++) sums[size + i] += sums[i];
    memset(sums, 0, static_cast<size_t>(size) * sizeof(float));
}

}  // namespace

void run_gathered_forward(const Kernels& kernels, const Problem& p) {
    const int64_t together = p.heads_together(), units = p.batch * p.heads / together, most = kernels.gathered_rows(p);
    if (units == 0 || p.rows == 0) return;
    const int64_t tasks = TASKS_PER_THREAD * p.threads, all = units * p.rows, size = kernels.gathered_partial(p);
    // With few rows the threads share the keys of each.
    const int64_t busy = divide_up(2 * p.threads, all);
    const int64_t parts = p.threads == 1 ? 1 : larger(1, smaller(busy, p.most_selected() / FEWEST_KEYS));
    const int64_t step = smaller(most, larger(1, divide_up(p.rows, larger(1, divide_up(tasks, units)))));
    const int64_t chunks = divide_up(p.rows, parts > 1 ? 1 : step), floats = kernels.gathered_scratch(p);
    const std::unique_ptr<float[]> partials(parts > 1 ? new float[static_cast<size_t>(all * parts * size)] : nullptr);
    parallel_for(units * chunks * parts, p.threads, floats, [&](int64_t index, float* memory) {
        const int64_t part = index % parts, unit = index / parts / chunks, chunk = index / parts % chunks;
        const int64_t start = chunk * (parts > 1 ? 1 : step), stop = parts > 1 ? start + 1 : smaller(start + step, p.rows);
        const int64_t of_batch = p.heads / together;
        kernels.gather[p.type](p, {unit / of_batch, unit % of_batch * together, start, stop, part, parts, nullptr},
                               parts > 1 ? partials.get() + index * size : nullptr, memory);
    });
    for (int64_t n = 0; parts > 1 && n < all; n++) {
        const int64_t unit = n / p.rows, of_batch = p.heads / together;
        kernels.merge_gathered[p.type](p, unit / of_batch, unit % of_batch * together, n % p.rows,
                                       partials.get() + n * parts * size, parts);
    }
}

void run_gathered_backward(const Kernels& kernels, const Problem& p) {
    const int64_t heads = p.batch * p.kv_heads, chunks = heads % p.threads == 0 ? 1 : smaller(p.threads, larger(1, p.rows));
    const int64_t step = divide_up(p.rows, chunks), run = rows_of_run(p), levels = step > run ? 2 : 1;
    const int64_t size = levels * kernels.sums_size(p), floats = kernels.gathered_back_scratch(p);
    // Sums of one turn of heads exist together, not those of all.
    const int64_t turn = larger(1, p.threads / chunks);
    for (int64_t first = 0; first < heads; first += turn) {
        const int64_t count = smaller(turn, heads - first);
        const auto all = zeros<float>(count * chunks * size);
        parallel_for(count * chunks, p.threads, floats, [&](int64_t index, float* memory) {
            const int64_t head = first + index / chunks, begin = index % chunks * step, end = smaller(begin + step, p.rows);
            float* sums = all.get() + index * size;
            for (int64_t start = begin; start < end; start += run) {
                if (start > begin) add_up(kernels, p, sums);
                const int64_t stop = smaller(start + run, end);
                kernels.gather_back[p.type](p, {head / p.kv_heads, head % p.kv_heads, start, stop, 0, p.keys, nullptr}, sums, memory);
            }
        });
        parallel_for(count, p.threads, 16, [&](int64_t index, float*) {
            const int64_t head = first + index;
            kernels.write_sums[p.type](p, head / p.kv_heads, head % p.kv_heads, all.get() + index * chunks * size, chunks * levels);
        });
    }
}

}  // namespace clearhead
