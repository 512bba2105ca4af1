// Cuts a request into tasks and runs them on the threads.
#pragma once
#include "problem.h"

namespace clearhead {

// All of these return false if there was no memory.
bool run_forward(const Kernels& kernels, const Problem& problem, int64_t threads);
bool run_backward(const Kernels& kernels, const Problem& problem, int64_t threads);
bool run_statistics(const Kernels& kernels, const Problem& problem, const Statistics& wanted, int64_t threads);

// The child of a fork has none of its parent's threads, and OpenMP would wait for them for ever.
void stay_alone_after_fork();

}  // namespace clearhead
