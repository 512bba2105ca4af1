// Cuts a problem into tasks and runs them on the threads.
#pragma once
#include "problem.h"

namespace clearhead {

// These functions throw std::bad_alloc without memory. NaN in fully masked rows, and in keys that are masked for every
// row, reaches no result.
void run_forward(const Kernels& kernels, const Problem& problem, int64_t threads);
void run_backward(const Kernels& kernels, const Problem& problem, int64_t threads);
void run_statistics(const Kernels& kernels, const Problem& problem, const Statistics& wanted, int64_t threads);

// Rows [rows[d], rows[d + 1]) see only the keys [keys[d], keys[d + 1]). Masks and dropout count within a sequence, as if
// it were item d of a batch.
struct PackedSequences {
    int64_t count = 0;                               // 0: the problem is a batch
    const int64_t *rows = nullptr, *keys = nullptr;  // cu_seqlens of queries and of keys

    // Whether they rise from 0 to the total numbers.
    bool fit(int64_t all_rows, int64_t all_keys) const;
};

using Pass = void (*)(const Kernels&, const Problem&, int64_t threads);

// Runs a pass on each sequence of a batch of one, without tensors of masks.
void run_packed(Pass pass, const Kernels& kernels, const Problem& all, const PackedSequences& sequences, int64_t threads);

}  // namespace clearhead
