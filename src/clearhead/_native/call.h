// The arguments of one call of a plan, in the order of Python.
#pragma once
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "driver.h"

namespace clearhead {

// The problem of a plan with the addresses of one call.
struct Call {
    Problem problem;
    PackedSequences sequences;
    int64_t threads, set;  // set: which instruction set
};

// Read sequences of numbers and addresses. Return false with a Python error.
bool read_operands(PyObject* values, Call& call);
bool read_extras(PyObject* values, Call& call);
bool read_backward(PyObject* values, Call& call);

// The names in these sequences, as a dict of tuples. Null with a Python error.
PyObject* argument_names();

}  // namespace clearhead
