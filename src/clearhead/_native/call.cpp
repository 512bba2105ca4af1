#include "call.h"

namespace clearhead {
namespace {

// The name of an argument, and the assignment of its number or address.
struct Argument {
    const char* name;
    void (*assign)(Problem& p, int64_t x);
};

void set(int64_t& to, int64_t x) { to = x; }
void set(bool& to, int64_t x) { to = x != 0; }
template <class T>
void set(T*& to, int64_t x) {
    to = reinterpret_cast<T*>(x);
}
// Dropout is drawn from a number in a tensor.
void read_seed(Problem& p, int64_t x) { p.seed = x ? *reinterpret_cast<const uint64_t*>(x) : 0; }

#define TO(place) [](Problem& p, int64_t x) { set(p.place, x); }

// The order in C++. Python's order is in kernels/_native_arguments.py, and the import compares the two.
constexpr Argument OPERANDS[] = {
    {"query", TO(query.data)},
    {"key", TO(key.data)},
    {"value", TO(value.data)},
    {"output", TO(output.data)},
    {"lse", TO(lse)},
};

constexpr Argument EXTRAS[] = {
    {"sinks", TO(sinks)},
    {"first", TO(first)},
    {"last", TO(last)},
    {"visible", TO(visible.data)},
    {"bias", TO(bias.data)},
    {"seed", read_seed},
    {"cu_seqlens_q", TO(row_starts)},
    {"cu_seqlens_k", TO(key_starts)},
    {"num_heads", TO(all_heads)},  // 0: those of the problem
    {"head", TO(first_head)},
    {"row", TO(first_row)},
    {"column", TO(first_key)},
    {"item", TO(first_item)},
};

constexpr Argument BACKWARD[] = {
    {"output_gradient", TO(output_gradient.data)},
    {"output_gradient_batch", TO(output_gradient.batch)},  // and its other strides
    {"output_gradient_head", TO(output_gradient.head)},
    {"output_gradient_row", TO(output_gradient.row)},
    {"lse_gradient", TO(lse_gradient)},
    {"query_gradient", TO(query_gradient.data)},
    {"key_gradient", TO(key_gradient.data)},
    {"value_gradient", TO(value_gradient.data)},
    {"correction", TO(correction)},
    {"bias_gradient", TO(bias_gradient.data)},
    {"whole_rows", TO(whole_rows)},
};

template <size_t COUNT>
bool read(const Argument (&arguments)[COUNT], PyObject* values, Problem& p) {
    if (PySequence_Size(values) != static_cast<Py_ssize_t>(COUNT)) {
        PyErr_SetString(PyExc_TypeError, "wrong number of addresses");
        return false;
    }
    for (size_t n = 0; n < COUNT; n++) {
        PyObject* value = PySequence_GetItem(values, static_cast<Py_ssize_t>(n));
        const int64_t x = value ? PyLong_AsLongLong(value) : -1;
        Py_XDECREF(value);
        if (x == -1 && PyErr_Occurred()) return false;
        arguments[n].assign(p, x);
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

bool read_operands(PyObject* values, Problem& p) { return read(OPERANDS, values, p); }
bool read_extras(PyObject* values, Problem& p) { return read(EXTRAS, values, p); }
bool read_backward(PyObject* values, Problem& p) { return read(BACKWARD, values, p); }

PyObject* argument_names() {
    return Py_BuildValue("{sNsNsN}", "operands", names_of(OPERANDS), "extras", names_of(EXTRAS), "backward",
                         names_of(BACKWARD));
}

}  // namespace clearhead
