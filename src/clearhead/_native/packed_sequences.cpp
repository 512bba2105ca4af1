#include <algorithm>
#include <functional>

#include "driver_shared.h"

namespace clearhead {
namespace {

// All threads run a sequence with more than 1 / PARTS_OF_THREAD of one thread's work. Shorter ones take one thread each.
constexpr int64_t PARTS_OF_THREAD = 4;

void shift(View& view, int64_t rows, int64_t bytes) {
    if (view.data) view.data = static_cast<char*>(view.data) + rows * view.row * bytes;
}

// One sequence as a problem.
Problem sequence_of(const Problem& all, int64_t number, int64_t threads) {
    Problem p = all;
    const int64_t row = all.row_starts[number], key = all.key_starts[number];
    p.rows = all.row_starts[number + 1] - row, p.keys = all.key_starts[number + 1] - key;
    p.first_item = number, p.sequences = 0, p.threads = threads;
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

}  // namespace

// Longer sequences come first.
void run_each_sequence(void (*pass)(const Kernels&, const Problem&), const Kernels& kernels, const Problem& all) {
    std::vector<std::pair<int64_t, int64_t>> works;  // of each sequence, and its number
    int64_t total = 0, next = 0;
    for (int64_t number = 0; number < all.sequences; number++) {
        const Problem p = sequence_of(all, number, 1);
        works.emplace_back(p.rows * p.keys + 1, number);
        total += works.back().first;
    }
    std::sort(works.begin(), works.end(), std::greater<>());
    const auto is_long = [&](int64_t n) { return works[static_cast<size_t>(n)].first * all.threads * PARTS_OF_THREAD > total; };
    const auto run = [&](int64_t n, int64_t threads) {
        pass(kernels, sequence_of(all, works[static_cast<size_t>(n)].second, threads));
    };
    for (; all.threads > 1 && next < all.sequences && is_long(next); next++) run(next, all.threads);
    parallel_for(all.sequences - next, all.threads, 16, [&](int64_t index, float*) { run(next + index, 1); });
}

}  // namespace clearhead
