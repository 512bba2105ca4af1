// `_attention.Plan`: everything of a call but its addresses, checked once.
#pragma once
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "problem.h"

namespace clearhead {

// The instruction sets this was built for, the one with the most features first.
extern const Kernels* const INSTRUCTION_SETS[];
extern const int64_t INSTRUCTION_SET_COUNT;

// Adds the type to a module; false with a Python error.
bool add_plan_type(PyObject* module);

}  // namespace clearhead
