#include "driver.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <utility>

#include "coverage.h"
#include "key_parts.h"
#include "parallel.h"

namespace clearhead {
namespace {

constexpr int64_t TASKS_PER_THREAD = 4;      // enough that the last ones to finish do not keep the others waiting
constexpr int64_t TASK_FLOATS = 128 * 1024;  // queries and outputs of a task, which have to stay in the cache
constexpr int64_t FEW_ROWS = 12;             // beyond these tiles take less time,
constexpr int64_t FEW_ROWS_OF_PAIRS = 5;     // or beyond these if they multiply pairs of bfloat16,
constexpr int64_t FEW_ROWS_AND_KEYS = 4;     // or beyond these with at most
constexpr int64_t FEW_KEYS = 16;
constexpr int64_t FEWEST_KEYS = 256;         // of one part of a head
constexpr int64_t MOST_KEYS = 2048;          // of the same, so that no sum is long
constexpr int64_t KEYS_OF_PART = 1024;       // of a backward pass in parts of the keys
constexpr int64_t TILES_OF_RUN = 128;        // whose sums over rows are added up before they go to a total,
constexpr int64_t ITEMS_OF_RUN = 64;         // or items of a batch, where they share a bias
constexpr int64_t STATISTICS_TASKS = 88;     // with sums over rows, whatever the threads: their grouping decides about bits
constexpr int64_t COLUMN_FLOATS = 4 * 1024 * 1024;  // of all their sums, if one task a head does not take more
constexpr int64_t MASK_FLOATS = 1024 * 1024;  // packed at a time, for each thread
constexpr int64_t FEWEST_SCORES = 64 * 1024;     // of a head that make packing its mask worth while

void add(const float* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

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

// Into how many parts, each with sums of its own, the rows of a key/value head are cut so that no thread is idle.
int64_t parts_of_backward(const Kernels& kernels, const Problem& p, int64_t heads, int64_t threads) {
    const int64_t most = divide_up(p.folded_rows(), kernels.tile_rows);
    if (threads == 1 || heads % threads == 0 || heads >= TASKS_PER_THREAD * threads) return 1;
    const int64_t wanted = divide_up(TASKS_PER_THREAD * threads, heads);
    return wanted < most ? wanted : most > 0 ? most : 1;
}

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

// Rows so few that a tile would be mostly empty.
bool decodes(const Kernels& kernels, const Problem& p) {
    const bool pairs = kernels.pairs && p.type == Type::bfloat16;
    return !p.drop_below && p.folded_rows() <= (p.keys <= FEW_KEYS ? FEW_ROWS_AND_KEYS : pairs ? FEW_ROWS_OF_PAIRS : FEW_ROWS);
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

// Sums over rows: a part of a head's rows has some of its own, so that no two threads add to the same numbers, and they
// are added up in the same order whatever the threads.
class PartSums {
  public:
    PartSums(const Problem& p, const Statistics& s, int64_t parts, int64_t step)
        : p_(p), s_(s), parts_(parts), step_(step), columns_(s.received ? columns_of(p) : 0) {
        const int64_t heads = p.batch * p.heads, cells = (heads * (s.map_rows + parts) + s.map_rows) * s.map_columns;
        memory_ = static_cast<float*>(calloc(static_cast<size_t>(3 * heads * parts * columns_ + 1), sizeof(float)));
        maps_ = static_cast<double*>(calloc(static_cast<size_t>(s.map ? cells : 0) + 1, sizeof(double)));
    }
    ~PartSums() {
        free(memory_);
        free(maps_);
    }
    PartSums(const PartSums&) = delete;

    bool enough() const { return memory_ && maps_; }

    TaskSums of(int64_t head, int64_t part) const {
        TaskSums sums = {};
        if (s_.received) {
            sums.received = memory_ + 3 * (head * parts_ + part) * columns_;
            sums.lost = sums.received + columns_;
            sums.viewers = sums.lost + columns_;
        }
        if (!s_.map) return sums;
        sums.first_map_row = s_.map_row(p_, part * step_);
        // The last row of one part may go to the same row of the map as the first of the next.
        const int64_t row = head * (s_.map_rows + parts_) + sums.first_map_row + part;
        sums.map = maps_ + row * s_.map_columns;
        return sums;
    }

    void add_up() const {
        for (int64_t head = 0; head < p_.batch * p_.heads; head++) {
            for (int64_t j = 0; s_.received && j < p_.keys; j += KEYS) add_up_keys(head, j);
            if (s_.map) add_up_map(head);
        }
    }

  private:
    static constexpr int64_t KEYS = 16;  // at once; behind the last there is room for as many

    void add_up_keys(int64_t head, int64_t start) const {
        double received[KEYS] = {}, viewers[KEYS] = {};
        for (int64_t part = 0; part < parts_; part++) {
            const float* own = memory_ + 3 * (head * parts_ + part) * columns_ + start;
            for (int64_t j = 0; j < KEYS; j++) {
                received[j] += static_cast<double>(own[j]) + own[j + columns_];
                viewers[j] += own[j + 2 * columns_];
            }
        }
        for (int64_t j = start; j < p_.keys && j < start + KEYS; j++) {
            s_.received[head * p_.keys + j] = static_cast<float>(received[j - start]);
            s_.viewers[head * p_.keys + j] = static_cast<float>(viewers[j - start]);
        }
    }

    void add_up_map(int64_t head) const {
        const int64_t cells = s_.map_rows * s_.map_columns;
        double* total = maps_ + p_.batch * p_.heads * (s_.map_rows + parts_) * s_.map_columns;  // behind all maps
        memset(total, 0, static_cast<size_t>(cells) * sizeof(double));
        for (int64_t part = 0; part < parts_; part++) {
            const TaskSums own = of(head, part);
            const int64_t stop = (part + 1) * step_ < p_.rows ? (part + 1) * step_ : p_.rows;
            const int64_t count = (s_.map_row(p_, stop - 1) + 1 - own.first_map_row) * s_.map_columns;
            double* to = total + own.first_map_row * s_.map_columns;
            for (int64_t i = 0; i < count; i++) {
                const double x = own.map[i];
                to[i] = !s_.map_max ? to[i] + x : x > to[i] || x != x ? x : to[i];
            }
        }
        for (int64_t i = 0; i < cells; i++) s_.map[head * cells + i] = static_cast<float>(total[i]);
    }

    const Problem& p_;
    const Statistics& s_;
    int64_t parts_, step_, columns_;  // columns: of one sum over rows
    float* memory_;                   // of each part received, lost and viewers
    double* maps_;
};

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

bool compute_statistics(const Kernels& kernels, const Problem& p, const Statistics& s, int64_t threads) {
    const int64_t heads = p.batch * p.heads;
    if (heads == 0 || p.rows == 0) return true;
    const int64_t together = s.averages(p) ? p.heads : 1, groups = heads / together;  // heads that add to the same rows
    const int64_t fitting = COLUMN_FLOATS / (3 * together * columns_of(p)) + 1;
    const int64_t most = s.received || s.map ? STATISTICS_TASKS : threads > 1 ? TASKS_PER_THREAD * threads : 1;
    const int64_t tiles = divide_up(p.rows, kernels.tile_rows);
    const int64_t wanted = divide_up(fitting < most ? fitting : most, groups);
    const int64_t step = divide_up(tiles, wanted < tiles ? wanted : tiles) * kernels.tile_rows;
    const int64_t parts = divide_up(p.rows, step), floats = kernels.statistics_scratch(p, s);
    PartSums sums(p, s, parts, step);
    if (!sums.enough()) return false;
    const bool enough = parallel_for(groups * parts, threads, floats, [&](int64_t index, float* memory) {
        const int64_t group = index % groups, part = parts - 1 - index / groups, start = part * step;
        const int64_t stop = start + step < p.rows ? start + step : p.rows;
        for (int64_t head = group * together; head < (group + 1) * together; head++) {
            const int64_t kv_head = head % p.heads / p.group(), folded = head % p.heads % p.group() * p.rows;
            const Task task = {head / p.heads, kv_head, folded + start, folded + stop, 0, p.keys, nullptr};
            kernels.statistics(p, s, task, sums.of(head, part), memory);
        }
    });
    if (enough) sums.add_up();
    return enough;
}

// Whether any of `count` numbers, without their signs, is above a limit as bits; above infinity there is only NaN.
template <class Bits>
bool any_above(const char* row, int64_t count, Bits limit) {
    constexpr Bits UNSIGNED = static_cast<Bits>(~Bits()) >> 1;
    Bits any = 0;
    for (int64_t j = 0; j < count; j++) {
        Bits bits;
        memcpy(&bits, row + j * static_cast<int64_t>(sizeof bits), sizeof bits);
        any = static_cast<Bits>(any | ((bits & UNSIGNED) > limit));
    }
    return any;
}

// Whether any number of the rows is NaN; of 4 bytes each, or of the problem's type.
bool has_nan(const Problem& p, const View& view, int64_t heads, int64_t rows, int64_t columns, int64_t bytes,
             int64_t threads) {
    const int64_t units = p.batch * heads;
    std::atomic<bool> found(false);
    parallel_for(units, threads, 16, [&](int64_t unit, float*) {
        bool any = false;
        for (int64_t i = 0; i < rows && !any; i++) {
            const int64_t place = unit / heads * view.batch + unit % heads * view.head + i * view.row;
            const char* row = static_cast<const char*>(view.data) + place * bytes;
            if (bytes == 4)
                any = any_above<uint32_t>(row, columns, 0x7f800000);
            else
                any = any_above<uint16_t>(row, columns, p.type == Type::bfloat16 ? 0x7f80 : 0x7c00);
        }
        if (any) found = true;
    });
    return found;
}

void clear_bias_gradient(const Problem& p) {
    if (!p.bias_gradient.data) return;
    const int64_t count = (p.bias_gradient.batch ? p.batch : 1) * p.heads * p.rows * p.keys;
    memset(p.bias_gradient.data, 0, static_cast<size_t>(count) * sizeof(float));
}

}  // namespace

// What is hidden altogether has weights of zero, so that only NaN and infinity in it can change a result, which is NaN then.
// Such a call is repeated with zeros there; any other costs one scan of its results for NaN.

bool run_forward(const Kernels& kernels, const Problem& p, int64_t threads) {
    if (!compute_forward(kernels, p, threads)) return false;
    const int64_t bytes = p.wide_output ? 4 : p.bytes();
    if (!may_hide_altogether(p) || !has_nan(p, p.output, p.heads, p.rows, p.value_dim, bytes, threads)) return true;
    const Isolated isolated(p);
    if (!isolated.enough_memory()) return false;
    return !isolated.any() || compute_forward(kernels, isolated.problem(), threads);
}

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

bool run_statistics(const Kernels& kernels, const Problem& p, const Statistics& s, int64_t threads) {
    if (!compute_statistics(kernels, p, s, threads)) return false;
    if (!p.output.data || !may_hide_altogether(p)) return true;  // of values, only outputs read any
    if (!has_nan(p, p.output, p.heads, p.rows, p.value_dim, p.bytes(), threads)) return true;
    const Isolated isolated(p);
    if (!isolated.enough_memory()) return false;
    if (!isolated.any()) return true;
    const size_t sums = static_cast<size_t>(s.averages(p) ? p.batch * p.rows * p.keys : 0);
    if (sums) memset(s.weights.data, 0, sums * sizeof(float));
    return compute_statistics(kernels, isolated.problem(), s, threads);
}

}  // namespace clearhead
