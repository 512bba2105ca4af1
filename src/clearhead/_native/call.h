// `_attention.Problem`: a problem without addresses, checked once; and the arguments of its calls.
#pragma once
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "driver.h"

namespace clearhead {

// The instruction sets of this build, those with more features first.
extern const Kernels* const INSTRUCTION_SETS[];
extern const int64_t INSTRUCTION_SET_COUNT;

// Adds the type `Problem` to a module. False with a Python error.
bool add_problem_type(PyObject* module);

// Read sequences of numbers and addresses into a problem. Return false with a Python error.
bool read_operands(PyObject* values, Problem& problem);
bool read_extras(PyObject* values, Problem& problem);
bool read_backward(PyObject* values, Problem& problem);

// The names in these sequences, as a dict of tuples. Null with a Python error.
PyObject* argument_names();

}  // namespace clearhead
