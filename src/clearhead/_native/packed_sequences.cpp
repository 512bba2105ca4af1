#include <algorithm>

#include "driver.h"
#include "parallel.h"

namespace clearhead {
namespace {

// All threads run a sequence with more than 1 / PARTS_OF_THREAD of one thread's work. Shorter ones take one thread each.
constexpr int64_t PARTS_OF_THREAD = 4;

void shift(View& view, int64_t rows, int64_t bytes) {
    if (view.data) view.data = static_cast<char*>(view.data) + rows * view.row * bytes;
}

Problem sequence_of(const Problem& all, const PackedSequences& sequences, int64_t d) {
    Problem p = all;
    const int64_t row = sequences.rows[d], key = sequences.keys[d];
    p.rows = sequences.rows[d + 1] - row, p.keys = sequences.keys[d + 1] - key, p.first_item = d;
    for (View Problem::*view : {&Problem::query, &Problem::output_gradient, &Problem::query_gradient})
        shift(p.*view, row, p.bytes());
    for (View Problem::*view : {&Problem::key, &Problem::value, &Problem::key_gradient, &Problem::value_gradient})
        shift(p.*view, key, p.bytes());
    shift(p.output, row, p.wide_output ? 4 : p.bytes());
    shift(p.exact_output, row, 4);
    if (p.lse) p.lse += row;
    if (p.lse_gradient) p.lse_gradient += row;
    if (p.correction) p.correction += row;
    p.stop = smaller(p.stop, p.keys);
    return p;
}

struct Share {
    int64_t sequence, work;
};

}  // namespace

bool PackedSequences::fit(int64_t all_rows, int64_t all_keys) const {
    bool rise = rows[0] == 0 && keys[0] == 0 && rows[count] == all_rows && keys[count] == all_keys;
    for (int64_t d = 0; d < count; d++) rise = rise && rows[d] <= rows[d + 1] && keys[d] <= keys[d + 1];
    return rise;
}

// Longer sequences come first.
void run_packed(Pass pass, const Kernels& kernels, const Problem& all, const PackedSequences& sequences, int64_t threads) {
    const std::unique_ptr<Share[]> shares(new Share[static_cast<size_t>(sequences.count)]);
    int64_t total = 0, next = 0;
    for (int64_t d = 0; d < sequences.count; d++) {
        const Problem p = sequence_of(all, sequences, d);
        shares[d] = {d, p.rows * p.keys + 1};
        total += shares[d].work;
    }
    std::sort(shares.get(), shares.get() + sequences.count,
              [](const Share& a, const Share& b) { return a.work > b.work; });
    for (; threads > 1 && next < sequences.count && shares[next].work * threads * PARTS_OF_THREAD > total; next++)
        pass(kernels, sequence_of(all, sequences, shares[next].sequence), threads);
    parallel_for(sequences.count - next, threads, 16, [&](int64_t index, float*) {
        pass(kernels, sequence_of(all, sequences, shares[next + index].sequence), 1);
    });
}

}  // namespace clearhead
