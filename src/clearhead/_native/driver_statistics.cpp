#include "driver_shared.h"

namespace clearhead {
namespace {

constexpr int64_t STATISTICS_TASKS = 88;     // with sums over rows, whatever the threads: their grouping decides about bits
constexpr int64_t COLUMN_FLOATS = 4 * 1024 * 1024;  // of all their sums, if one task a head does not take more

// Sums over rows. Each chunk of a head's rows has separate sums, so no two threads add to the same numbers. The chunks
// are added in the same order for any number of threads.
class ChunkSums {
  public:
    ChunkSums(const Problem& p, const Statistics& s, int64_t chunks, int64_t step)
        : p_(p), s_(s), chunks_(chunks), step_(step), columns_(s.received ? columns_of(p) : 0),
          cells_(s.map ? s.map_rows * s.map_columns : 0), memory_(zeros<float>(3 * p.batch * p.heads * chunks * columns_)),
          maps_(zeros<double>(p.batch * p.heads * chunks * cells_)) {}

    TaskSums of(int64_t head, int64_t chunk) const {
        TaskSums sums = {};
        if (s_.received) {
            sums.received = memory_.get() + 3 * (head * chunks_ + chunk) * columns_;
            sums.lost = sums.received + columns_;
            sums.viewers = sums.lost + columns_;
        }
        if (s_.map) sums.map = maps_.get() + (head * chunks_ + chunk) * cells_;
        return sums;
    }

    void add_up() const {
        for (int64_t head = 0; head < p_.batch * p_.heads; head++) {
            for (int64_t j = 0; s_.received && j < p_.keys; j++) add_up_key(head, j);
            if (s_.map) add_up_map(head);
        }
    }

  private:
    void add_up_key(int64_t head, int64_t j) const {
        double received = 0, viewers = 0;
        for (int64_t chunk = 0; chunk < chunks_; chunk++) {
            const TaskSums of_chunk = of(head, chunk);
            received += static_cast<double>(of_chunk.received[j]) + of_chunk.lost[j];
            viewers += of_chunk.viewers[j];
        }
        s_.received[head * p_.keys + j] = static_cast<float>(received);
        s_.viewers[head * p_.keys + j] = static_cast<float>(viewers);
    }

    void add_up_map(int64_t head) const {
        double* total = of(head, 0).map;
        for (int64_t chunk = 1; chunk < chunks_; chunk++) {
            const double* map = of(head, chunk).map;
            const int64_t last_row = smaller((chunk + 1) * step_, p_.rows) - 1;
            const int64_t start = s_.map_row(p_, chunk * step_), stop = s_.map_row(p_, last_row) + 1;
            for (int64_t i = start * s_.map_columns; i < stop * s_.map_columns; i++)
                total[i] = !s_.map_max ? total[i] + map[i] : map[i] > total[i] || map[i] != map[i] ? map[i] : total[i];
        }
        for (int64_t i = 0; i < cells_; i++) s_.map[head * cells_ + i] = static_cast<float>(total[i]);
    }

    const Problem& p_;
    const Statistics& s_;
    int64_t chunks_, step_, columns_, cells_;      // columns: of one sum over rows; cells: of a map
    const std::unique_ptr<float[], Free> memory_;  // of each chunk received, lost and viewers
    const std::unique_ptr<double[], Free> maps_;   // of each chunk, which writes some of its rows
};

void compute_statistics(const Kernels& kernels, const Problem& p, const Statistics& s) {
    const int64_t heads = p.batch * p.heads;
    if (heads == 0 || p.rows == 0) return;
    const int64_t together = s.averages(p) ? p.heads : 1, groups = heads / together;  // heads that add to the same rows
    const int64_t fitting = COLUMN_FLOATS / (3 * together * columns_of(p)) + 1;
    const int64_t most = s.received || s.map ? STATISTICS_TASKS : p.threads > 1 ? TASKS_PER_THREAD * p.threads : 1;
    const int64_t tiles = divide_up(p.rows, kernels.tile_rows);
    const int64_t step = divide_up(tiles, smaller(tiles, divide_up(smaller(fitting, most), groups))) * kernels.tile_rows;
    const int64_t chunks = divide_up(p.rows, step), gathers = p.selected.data != nullptr;
    const int64_t floats = gathers ? kernels.gathered_statistics_scratch(p) : kernels.statistics_scratch(p, s);
    const auto pass = (gathers ? kernels.gather_statistics : kernels.statistics)[p.type];
    const ChunkSums sums(p, s, chunks, step);
    parallel_for(groups * chunks, p.threads, floats, [&](int64_t index, float* memory) {
        const int64_t group = index % groups, chunk = chunks - 1 - index / groups, start = chunk * step;
        const int64_t stop = smaller(start + step, p.rows);
        for (int64_t head = group * together; head < (group + 1) * together; head++) {
            const int64_t kv_head = head % p.heads / p.group(), folded = head % p.heads % p.group() * p.rows;
            const Task task = {head / p.heads, kv_head, folded + start, folded + stop, 0, p.keys, nullptr};
            pass(p, s, task, sums.of(head, chunk), memory);
        }
    });
    sums.add_up();
}

}  // namespace

void run_statistics(const Kernels& kernels, const Problem& p, const Statistics& s) {
    compute_statistics(kernels, p, s);
    if (!p.output.data || p.selected.data || !may_hide_altogether(p)) return;  // only outputs read values
    if (!has_nan(p, p.output, p.heads, p.rows, p.value_dim, p.bytes())) return;
    const Isolated isolated(p);
    if (!isolated.any()) return;
    if (s.averages(p)) memset(s.weights.data, 0, static_cast<size_t>(p.batch * p.rows * p.keys) * sizeof(float));
    compute_statistics(kernels, isolated.problem(), s);
}

}  // namespace clearhead
