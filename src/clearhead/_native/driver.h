// Cuts a problem into tasks and runs them on the threads.
#pragma once
#include "problem.h"

namespace clearhead {

// All of these return false if there was no memory. NaN in what masks hide altogether reaches no result.
bool run_forward(const Kernels& kernels, const Problem& problem, int64_t threads);
bool run_backward(const Kernels& kernels, const Problem& problem, int64_t threads);
bool run_statistics(const Kernels& kernels, const Problem& problem, const Statistics& wanted, int64_t threads);

// Documents end to end: rows [starts of rows d, d + 1) see the keys [starts of keys d, d + 1) alone. Masks, lengths of
// keys and dropout count within a document, as if it were item d of a batch.
struct Documents {
    int64_t count = 0;             // 0: the problem is a batch
    bool from_end = false;         // the band counts rows so that the last row stands at the last key
    bool wide = true;              // int64 instead of int32
    const void *rows = nullptr, *keys = nullptr;  // (count + 1) each
    const void* key_lengths = nullptr;            // (count): keys of a document that are used, or null

    int64_t row(int64_t document) const { return at(rows, document); }
    int64_t key(int64_t document) const { return at(keys, document); }
    // How many keys are used.
    int64_t key_count(int64_t document) const;
    // Whether the starts rise from 0 or more to at most the number of all.
    bool fit(int64_t all_rows, int64_t all_keys) const;

  private:
    int64_t at(const void* numbers, int64_t index) const {
        return wide ? static_cast<const int64_t*>(numbers)[index] : static_cast<const int32_t*>(numbers)[index];
    }
};

// The same of documents that lie in a batch of one, without tensors of masks. Memory and work are those of the documents.
bool run_documents_forward(const Kernels& kernels, const Problem& all, const Documents& documents, int64_t threads);
bool run_documents_backward(const Kernels& kernels, const Problem& all, const Documents& documents, int64_t threads);

}  // namespace clearhead
