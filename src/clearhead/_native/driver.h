// Cuts a problem into tasks and runs them on the threads.
#pragma once
#include "problem.h"

namespace clearhead {

// These functions throw std::bad_alloc without memory. NaN in fully masked rows, and in keys that are masked for every
// row, reaches no result.
void run_forward(const Kernels& kernels, const Problem& problem);
void run_backward(const Kernels& kernels, const Problem& problem);
void run_statistics(const Kernels& kernels, const Problem& problem, const Statistics& wanted);

}  // namespace clearhead
