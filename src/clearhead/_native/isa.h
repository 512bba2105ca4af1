// What an instruction set is: ISA (its namespace), LANES (floats in a vector), ROW_VECTORS and STEP (the vectors and rows of
// a product whose sums are in registers; STEP is 8 where there are 32 registers, else 4), and
// HAS_PAIRS if vectors of pairs of bfloat16 are multiplied fast. The source of an instruction set defines them before it
// includes its kernel.
#pragma once
#include "problem.h"

#ifndef ISA  // a header by itself, as editors and a test read it
#define ISA one_header
#define ROW_VECTORS 3
#define CPU_HAS_ISA true
#ifdef __AVX512F__
#define LANES 16
#define STEP 8
#else
#define LANES 4
#define STEP 4
#endif
#endif
