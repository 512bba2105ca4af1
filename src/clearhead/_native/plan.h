// `_attention.Plan`: all properties of a call except addresses, checked once.
#pragma once
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "problem.h"

namespace clearhead {

// The instruction sets of this build, those with more features first.
extern const InstructionSet* const INSTRUCTION_SETS[];
extern const int64_t INSTRUCTION_SET_COUNT;

// Adds the type to a module; false with a Python error.
bool add_plan_type(PyObject* module);

}  // namespace clearhead
