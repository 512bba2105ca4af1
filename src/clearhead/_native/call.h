// `_attention.Plan`: all properties of a call except addresses, checked once; and the arguments of its calls.
#pragma once
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "driver.h"

namespace clearhead {

// The instruction sets of this build, those with more features first.
extern const InstructionSet* const INSTRUCTION_SETS[];
extern const int64_t INSTRUCTION_SET_COUNT;

// Adds the type `Plan` to a module. False with a Python error.
bool add_plan_type(PyObject* module);

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
