#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>

#include "driver.h"
#include "parallel.h"

namespace clearhead {
namespace {

// A document is run by all threads if it is more than this part of the work of one of them, else by one.
constexpr int64_t PARTS_OF_THREAD = 4;

void shift(View& view, int64_t rows, int64_t bytes) {
    if (view.data) view.data = static_cast<char*>(view.data) + rows * view.row * bytes;
}

Problem document_of(const Problem& all, const Documents& documents, int64_t d) {
    Problem p = all;
    const int64_t row = documents.rows[d], key = documents.keys[d];
    p.rows = documents.rows[d + 1] - row, p.keys = documents.keys[d + 1] - key, p.first_item = d;
    for (View Problem::*view : {&Problem::query, &Problem::output_gradient, &Problem::query_gradient})
        shift(p.*view, row, p.bytes());
    for (View Problem::*view : {&Problem::key, &Problem::value, &Problem::key_gradient, &Problem::value_gradient})
        shift(p.*view, key, p.bytes());
    shift(p.output, row, p.wide_output ? 4 : p.bytes());
    shift(p.exact_output, row, 4);
    if (p.lse) p.lse += row;
    if (p.lse_gradient) p.lse_gradient += row;
    if (p.correction) p.correction += row;
    p.stop = p.stop < p.keys ? p.stop : p.keys;
    return p;
}

struct Share {
    int64_t document, work;
};

// run(problem of a document, threads) for each, those that take longest first.
template <class Run>
bool each_document(const Problem& all, const Documents& documents, int64_t threads, const Run& run) {
    Share* shares = static_cast<Share*>(malloc(static_cast<size_t>(documents.count) * sizeof(Share)));
    if (!shares) return false;
    int64_t total = 0, next = 0;
    for (int64_t d = 0; d < documents.count; d++) {
        const int64_t rows = documents.rows[d + 1] - documents.rows[d], keys = documents.keys[d + 1] - documents.keys[d];
        shares[d] = {d, rows * keys + 1};
        total += shares[d].work;
    }
    std::sort(shares, shares + documents.count, [](const Share& a, const Share& b) { return a.work > b.work; });
    std::atomic<bool> enough(true);
    for (; threads > 1 && next < documents.count && shares[next].work * threads * PARTS_OF_THREAD > total; next++)
        if (!run(document_of(all, documents, shares[next].document), threads)) enough = false;
    const bool all_run = parallel_for(documents.count - next, threads, 16, [&](int64_t index, float*) {
        if (!run(document_of(all, documents, shares[next + index].document), 1)) enough = false;
    });
    free(shares);
    return all_run && enough;
}

}  // namespace

bool Documents::fit(int64_t all_rows, int64_t all_keys) const {
    bool rise = rows[0] == 0 && keys[0] == 0 && rows[count] == all_rows && keys[count] == all_keys;
    for (int64_t d = 0; d < count; d++) rise = rise && rows[d] <= rows[d + 1] && keys[d] <= keys[d + 1];
    return rise;
}

bool run_documents_forward(const Kernels& kernels, const Problem& all, const Documents& documents, int64_t threads) {
    return each_document(all, documents, threads,
                         [&](const Problem& p, int64_t many) { return run_forward(kernels, p, many); });
}

bool run_documents_backward(const Kernels& kernels, const Problem& all, const Documents& documents, int64_t threads) {
    return each_document(all, documents, threads,
                         [&](const Problem& p, int64_t many) { return run_backward(kernels, p, many); });
}

}  // namespace clearhead
