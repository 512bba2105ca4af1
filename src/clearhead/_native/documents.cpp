#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    const int64_t row = documents.row(d), key = documents.key(d);
    p.rows = documents.row(d + 1) - row, p.keys = documents.key_count(d), p.first_item = d;
    for (View Problem::*view : {&Problem::query, &Problem::output_gradient, &Problem::query_gradient})
        shift(p.*view, row, p.bytes());
    for (View Problem::*view : {&Problem::key, &Problem::value, &Problem::key_gradient, &Problem::value_gradient})
        shift(p.*view, key, p.bytes());
    shift(p.output, row, p.wide_output ? 4 : p.bytes());
    shift(p.exact_output, row, 4);
    if (p.lse) p.lse += row;
    if (p.lse_gradient) p.lse_gradient += row;
    if (p.correction) p.correction += row;
    const int64_t moved = documents.from_end ? p.keys - p.rows : 0;
    p.low += moved, p.high += moved;
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
        const int64_t rows = documents.row(d + 1) - documents.row(d);
        shares[d] = {d, rows * documents.key_count(d) + 1};
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

// Zero in the rows [start, stop) of all heads.
void clear_rows(const View& view, int64_t heads, int64_t start, int64_t stop, int64_t columns, int64_t bytes) {
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = start; i < stop; i++)
            memset(static_cast<char*>(view.data) + (h * view.head + i * view.row) * bytes, 0,
                   static_cast<size_t>(columns * bytes));
}

// work(start, stop) for the rows that are in no document.
template <class Work>
void each_gap_of_rows(const Problem& all, const Documents& documents, const Work& work) {
    work(int64_t(0), documents.row(0));
    work(documents.row(documents.count), all.rows);
}

// work(start, stop) for the keys that no document uses.
template <class Work>
void each_gap_of_keys(const Problem& all, const Documents& documents, const Work& work) {
    work(int64_t(0), documents.key(0));
    for (int64_t d = 0; documents.key_lengths && d < documents.count; d++)
        work(documents.key(d) + documents.key_count(d), documents.key(d + 1));
    work(documents.key(documents.count), all.keys);
}

}  // namespace

int64_t Documents::key_count(int64_t document) const {
    const int64_t there = key(document + 1) - key(document);
    const int64_t used = key_lengths ? at(key_lengths, document) : there;
    return used < 0 ? 0 : used < there ? used : there;
}

bool Documents::fit(int64_t all_rows, int64_t all_keys) const {
    bool rise = row(0) >= 0 && key(0) >= 0 && row(count) <= all_rows && key(count) <= all_keys;
    for (int64_t d = 0; d < count; d++) rise = rise && row(d) <= row(d + 1) && key(d) <= key(d + 1);
    return rise;
}

bool run_documents_forward(const Kernels& kernels, const Problem& all, const Documents& documents, int64_t threads) {
    each_gap_of_rows(all, documents, [&](int64_t start, int64_t stop) {
        clear_rows(all.output, all.heads, start, stop, all.value_dim, all.wide_output ? 4 : all.bytes());
        for (int64_t h = 0; all.lse && h < all.heads; h++)
            for (int64_t i = start; i < stop; i++)
                all.lse[all.row_place(0, h, i)] = all.sinks ? all.sinks[h] : -INFINITY;
    });
    return each_document(all, documents, threads,
                         [&](const Problem& p, int64_t many) { return run_forward(kernels, p, many); });
}

bool run_documents_backward(const Kernels& kernels, const Problem& all, const Documents& documents, int64_t threads) {
    each_gap_of_rows(all, documents, [&](int64_t start, int64_t stop) {
        clear_rows(all.query_gradient, all.heads, start, stop, all.dim, all.bytes());
        for (int64_t h = 0; h < all.heads; h++)
            for (int64_t i = start; i < stop; i++) all.write_correction_of_hidden_row(0, h, i);
    });
    each_gap_of_keys(all, documents, [&](int64_t start, int64_t stop) {
        clear_rows(all.key_gradient, all.kv_heads, start, stop, all.dim, all.bytes());
        clear_rows(all.value_gradient, all.kv_heads, start, stop, all.value_dim, all.bytes());
    });
    return each_document(all, documents, threads,
                         [&](const Problem& p, int64_t many) { return run_backward(kernels, p, many); });
}

}  // namespace clearhead
