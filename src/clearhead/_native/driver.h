// Cuts a problem into tasks and runs them on the threads.
#pragma once
#include "problem.h"

namespace clearhead {

// All of these return false if there was no memory. NaN in what masks hide altogether reaches no result.
bool run_forward(const Kernels& kernels, const Problem& problem, int64_t threads);
bool run_backward(const Kernels& kernels, const Problem& problem, int64_t threads);
bool run_statistics(const Kernels& kernels, const Problem& problem, const Statistics& wanted, int64_t threads);

// Documents end to end: rows [starts of rows d, d + 1) see the keys [starts of keys d, d + 1) only. Masks and dropout
// count within a document, as if it were item d of a batch.
struct Documents {
    int64_t count = 0;                               // 0: the problem is a batch
    const int64_t *rows = nullptr, *keys = nullptr;  // where each starts, and where the last ends

    // Whether the starts rise from 0 to the number of all.
    bool fit(int64_t all_rows, int64_t all_keys) const;
};

// The same of documents that lie in a batch of one, without tensors of masks. Memory and work are those of the documents.
bool run_documents_forward(const Kernels& kernels, const Problem& all, const Documents& documents, int64_t threads);
bool run_documents_backward(const Kernels& kernels, const Problem& all, const Documents& documents, int64_t threads);

}  // namespace clearhead
