#include <algorithm>
#include <functional>

#include "driver_shared.h"

namespace clearhead {
namespace {

// All threads run a sequence with more than 1 / LONG_PER_THREAD of one thread's work. Shorter ones take one thread each.
constexpr int64_t LONG_PER_THREAD = 4;

}  // namespace

Problem sequence_of(const Problem& all, int64_t number, int64_t threads) {
    const int64_t row = all.cu_seqlens_q[number], key = all.cu_seqlens_k[number];
    Problem p = part_of(all, 0, 0, 0, row, key);
    p.rows = all.cu_seqlens_q[number + 1] - row, p.keys = all.cu_seqlens_k[number + 1] - key, p.stop = smaller(p.stop, p.keys);
    p.offset.item = number, p.sequences = 0, p.threads = threads;
    return p;
}

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
    const auto is_long = [&](int64_t n) { return works[static_cast<size_t>(n)].first * all.threads * LONG_PER_THREAD > total; };
    const auto run = [&](int64_t n, int64_t threads) {
        pass(kernels, sequence_of(all, works[static_cast<size_t>(n)].second, threads));
    };
    for (; all.threads > 1 && next < all.sequences && is_long(next); next++) run(next, all.threads);
    parallel_for(all.sequences - next, all.threads, 16, [&](int64_t index, float*) { run(next + index, 1); });
}

}  // namespace clearhead
