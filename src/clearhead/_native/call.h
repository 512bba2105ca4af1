// The arguments of one call of a plan, in the order in which Python passes them.
#pragma once
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "driver.h"

namespace clearhead {

// The problem of a plan with the addresses of one call.
struct Call {
    Problem problem;
    Documents documents;
    int64_t threads, set;  // set: which instruction set
};

// Sequences of numbers and addresses; false with a Python error.
bool read_operands(PyObject* values, Call& call);
bool read_extras(PyObject* values, Call& call);
bool read_backward(PyObject* values, Call& call);

// The names in these sequences, as a dict of tuples; null with a Python error.
PyObject* argument_names();

}  // namespace clearhead
