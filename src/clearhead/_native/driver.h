// Cuts a problem into tasks and runs them on the threads.
#pragma once
#include "problem.h"

namespace clearhead {

// All of these throw std::bad_alloc if there is no memory. NaN in what masks hide altogether reaches no result.
void run_forward(const Kernels& kernels, const Problem& problem, int64_t threads);
void run_backward(const Kernels& kernels, const Problem& problem, int64_t threads);
void run_statistics(const Kernels& kernels, const Problem& problem, const Statistics& wanted, int64_t threads);

// Packed sequences: rows [rows[d], rows[d + 1]) see the keys [keys[d], keys[d + 1]) only. Masks and dropout count within
// a sequence, as if it were item d of a batch.
struct PackedSequences {
    int64_t count = 0;                               // 0: the problem is a batch
    const int64_t *rows = nullptr, *keys = nullptr;  // cu_seqlens of queries and of keys

    // Whether they rise from 0 to the number of all.
    bool fit(int64_t all_rows, int64_t all_keys) const;
};

using Pass = void (*)(const Kernels&, const Problem&, int64_t threads);

// A pass over sequences that lie in a batch of one, without tensors of masks. Memory and work are those of the sequences.
void run_packed(Pass pass, const Kernels& kernels, const Problem& all, const PackedSequences& sequences, int64_t threads);

}  // namespace clearhead
