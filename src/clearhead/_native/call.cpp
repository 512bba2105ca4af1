#include "call.h"

namespace clearhead {
namespace {

// The name of an argument, and the assignment of its number or address.
struct Argument {
    const char* name;
    void (*assign)(Call& call, int64_t x);
};

void set(int64_t& to, int64_t x) { to = x; }
void set(bool& to, int64_t x) { to = x != 0; }
template <class T>
void set(T*& to, int64_t x) {
    to = reinterpret_cast<T*>(x);
}
// Dropout is drawn from a number in a tensor.
void read_seed(Call& call, int64_t x) { call.problem.seed = x ? *reinterpret_cast<const uint64_t*>(x) : 0; }

#define TO(place) [](Call& call, int64_t x) { set(call.place, x); }

// The order in C++. Python's order is in kernels/_native_arguments.py, and the import compares the two.
constexpr Argument OPERANDS[] = {
    {"query", TO(problem.query.data)},
    {"key", TO(problem.key.data)},
    {"value", TO(problem.value.data)},
    {"output", TO(problem.output.data)},
    {"lse", TO(problem.lse)},
};

constexpr Argument EXTRAS[] = {
    {"sinks", TO(problem.sinks)},
    {"first", TO(problem.first)},
    {"last", TO(problem.last)},
    {"visible", TO(problem.visible.data)},
    {"bias", TO(problem.bias.data)},
    {"seed", read_seed},
    {"cu_seqlens_q", TO(sequences.rows)},
    {"cu_seqlens_k", TO(sequences.keys)},
    {"num_heads", TO(problem.all_heads)},  // 0: those of the plan
    {"head", TO(problem.first_head)},
    {"row", TO(problem.first_row)},
    {"column", TO(problem.first_key)},
    {"item", TO(problem.first_item)},
};

constexpr Argument BACKWARD[] = {
    {"output_gradient", TO(problem.output_gradient.data)},
    {"output_gradient_batch", TO(problem.output_gradient.batch)},  // and its other strides
    {"output_gradient_head", TO(problem.output_gradient.head)},
    {"output_gradient_row", TO(problem.output_gradient.row)},
    {"lse_gradient", TO(problem.lse_gradient)},
    {"query_gradient", TO(problem.query_gradient.data)},
    {"key_gradient", TO(problem.key_gradient.data)},
    {"value_gradient", TO(problem.value_gradient.data)},
    {"correction", TO(problem.correction)},
    {"bias_gradient", TO(problem.bias_gradient.data)},
    {"whole_rows", TO(problem.whole_rows)},
};

template <size_t COUNT>
bool read(const Argument (&arguments)[COUNT], PyObject* values, Call& call) {
    if (PySequence_Size(values) != static_cast<Py_ssize_t>(COUNT)) {
        PyErr_SetString(PyExc_TypeError, "wrong number of addresses");
        return false;
    }
    for (size_t n = 0; n < COUNT; n++) {
        PyObject* value = PySequence_GetItem(values, static_cast<Py_ssize_t>(n));
        const int64_t x = value ? PyLong_AsLongLong(value) : -1;
        Py_XDECREF(value);
        if (x == -1 && PyErr_Occurred()) return false;
        arguments[n].assign(call, x);
    }
    return true;
}

template <size_t COUNT>
PyObject* names_of(const Argument (&arguments)[COUNT]) {
    PyObject* names = PyTuple_New(COUNT);
    for (size_t n = 0; names && n < COUNT; n++) {
        PyObject* name = PyUnicode_FromString(arguments[n].name);
        if (!name || PyTuple_SetItem(names, static_cast<Py_ssize_t>(n), name) < 0) Py_CLEAR(names);
    }
    return names;
}

}  // namespace

bool read_operands(PyObject* values, Call& call) { return read(OPERANDS, values, call); }
bool read_extras(PyObject* values, Call& call) { return read(EXTRAS, values, call); }
bool read_backward(PyObject* values, Call& call) { return read(BACKWARD, values, call); }

PyObject* argument_names() {
    return Py_BuildValue("{sNsNsN}", "operands", names_of(OPERANDS), "extras", names_of(EXTRAS), "backward",
                         names_of(BACKWARD));
}

}  // namespace clearhead
