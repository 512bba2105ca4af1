// The Python module, built for the stable ABI. It takes numbers and addresses, without PyTorch's types.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <limits.h>

#include <initializer_list>
#include <new>
#include <string>

#include "coverage.h"
#include "parallel.h"

namespace clearhead {
namespace {

constexpr int64_t NO_LIMIT = int64_t(1) << 40;  // of a band: more than any distance of a row and a key

// The name of an argument, and the assignment of its value.
template <class Target>
struct Argument {
    const char* name;
    void (*assign)(Target& to, PyObject* value);
};

template <class T>
void set(T& to, PyObject* value) {
    to = static_cast<T>(PyLong_AsLongLong(value));
}
template <class T>
void set(T*& to, PyObject* value) {
    to = reinterpret_cast<T*>(PyLong_AsLongLong(value));
}
void set(double& to, PyObject* value) { to = PyFloat_AsDouble(value); }
// Assigns the first numbers of a tuple.
void set_each(std::initializer_list<int64_t*> members, PyObject* numbers) {
    Py_ssize_t n = 0;
    for (int64_t* member : members)
        if (n < PyTuple_Size(numbers)) set(*member, PyTuple_GetItem(numbers, n++));
}
// Strides of batch, heads, rows and, in masks, columns.
void set(View& to, PyObject* value) { set_each({&to.batch, &to.head, &to.row, &to.column}, value); }

// An argument that is assigned to a member, to the member of its name, or, if it is a tuple, to several members.
#define TO(name, member) {name, [](auto& to, PyObject* value) { set(to.member, value); }}
#define ARGUMENT(member) TO(#member, member)
#define ADDRESS(member) TO(#member, member.data)
#define OF_TABLE(member) \
    TO(#member "_vectors", member.vectors), TO(#member "_gradient", member.vectors_gradient)
#define TO_EACH(name, ...) {name, [](auto& to, PyObject* value) { set_each({__VA_ARGS__}, value); }}

// All but the addresses, by name. Tensors have strides.
constexpr Argument<Problem> PLAN[] = {
    ARGUMENT(type),
    TO_EACH("query_shape", &to.batch, &to.heads, &to.rows, &to.dim),
    TO_EACH("value_shape", &to.batch, &to.kv_heads, &to.keys, &to.value_dim),
    TO("scale", exact_scale), TO("softcap", exact_softcap), ARGUMENT(drop_below), ARGUMENT(wide_output), ARGUMENT(row_sinks),
    ARGUMENT(query), ARGUMENT(key), ARGUMENT(value), ARGUMENT(output),
    ARGUMENT(query_gradient), ARGUMENT(key_gradient), ARGUMENT(value_gradient), ARGUMENT(bias_gradient),
    ARGUMENT(sequences),
    TO_EACH("last", &to.range_batch, &to.range_row), ARGUMENT(visible), ARGUMENT(bias),
    ARGUMENT(selected), TO_EACH("selection", &to.selected_heads, &to.selected_count, &to.selected_block),
};

// Dropout is drawn from a number in a tensor.
void read_seed(Problem& p, PyObject* value) {
    const uint64_t* seed;
    set(seed, value);
    p.seed = seed ? *seed : 0;
}

// The order in C++. Python's order is in kernels/_native_arguments.py, and the import compares the two. A call may end
// after `stop` and after any later argument; those that are left out are 0.
constexpr Argument<Problem> CALL[] = {
    ARGUMENT(threads),
    TO("query", query.data),
    TO("key", key.data),
    TO("value", value.data),
    TO("output", output.data),
    ARGUMENT(lse),
    ARGUMENT(keys),
    ARGUMENT(low),
    ARGUMENT(high),
    ARGUMENT(stop),
    ARGUMENT(sinks),
    ARGUMENT(first),
    ARGUMENT(last),
    TO("visible", visible.data),
    TO("bias", bias.data),
    TO("selected", selected.data),
    {"seed", read_seed},
    ARGUMENT(cu_seqlens_q),
    ARGUMENT(cu_seqlens_k),
    TO("num_heads", offset.num_heads),  // 0: those of the problem
    TO("head", offset.head),
    TO("row", offset.row),
    TO("column", offset.column),
    TO("item", offset.item),
    TO("output_gradient", output_gradient.data),
    TO("output_gradient_batch", output_gradient.batch),  // and its other strides
    TO("output_gradient_head", output_gradient.head),
    TO("output_gradient_row", output_gradient.row),
    ARGUMENT(lse_gradient),
    TO("query_gradient", query_gradient.data),
    TO("key_gradient", key_gradient.data),
    TO("value_gradient", value_gradient.data),
    ARGUMENT(correction),
    TO("bias_gradient", bias_gradient.data),
    ARGUMENT(whole_rows),
};

constexpr Argument<Statistics> STATISTICS[] = {
    ARGUMENT(counted), ARGUMENT(largest), ARGUMENT(visible), ARGUMENT(raw),
    ARGUMENT(entropy), ARGUMENT(confidence), ARGUMENT(norm), ARGUMENT(received), ARGUMENT(viewers),
    ARGUMENT(top_weights), ARGUMENT(top_keys), ARGUMENT(top),
    TO("weights", weights.data), TO("weights_strides", weights),
    ARGUMENT(map), ARGUMENT(map_rows), ARGUMENT(map_columns), ARGUMENT(map_max),
    ARGUMENT(sink), ARGUMENT(first_keys), ARGUMENT(sink_keys),
    ARGUMENT(distance), ARGUMENT(shift), ARGUMENT(stripes), ARGUMENT(offsets), ARGUMENT(offset_count),
    ARGUMENT(mass), ARGUMENT(mass_ranges), ARGUMENT(query_labels), ARGUMENT(key_labels), ARGUMENT(mass_count),
    ARGUMENT(exact),
};

// In order, as in _native/coverage.py, which the import compares.
constexpr Argument<CoverageSearch> COVERAGE[] = {
    ARGUMENT(batch), ARGUMENT(heads), ARGUMENT(rows), ARGUMENT(keys), ARGUMENT(low), ARGUMENT(high), ARGUMENT(stop),
    ARGUMENT(rows_seen), ARGUMENT(keys_seen),
};
constexpr Argument<Cells> CELLS[] = {
    ARGUMENT(data), ARGUMENT(bytes), ARGUMENT(hidden), ARGUMENT(batch), ARGUMENT(head), ARGUMENT(row), ARGUMENT(column),
};

// In order, as in _encoder/steps.py, which the import compares. The first is the number of an instruction set.
constexpr Argument<RowNorm> NORM[] = {
    ARGUMENT(type), ARGUMENT(threads), ARGUMENT(rows), ARGUMENT(features), ARGUMENT(x), ARGUMENT(residual),
    ARGUMENT(total), ARGUMENT(weight), ARGUMENT(bias), ARGUMENT(epsilon), ARGUMENT(centers),
};
constexpr Argument<Rotation> ROTATION[] = {
    ARGUMENT(type), ARGUMENT(threads), ARGUMENT(rows), ARGUMENT(heads), ARGUMENT(dim), ARGUMENT(row), ARGUMENT(head),
    ARGUMENT(positions), ARGUMENT(x), ARGUMENT(cosine), ARGUMENT(sine),
};
constexpr Argument<Affine> AFFINE[] = {
    ARGUMENT(type), ARGUMENT(threads), ARGUMENT(rows), ARGUMENT(inner), ARGUMENT(outer),
    ARGUMENT(x), ARGUMENT(weight), ARGUMENT(bias), ARGUMENT(y), ARGUMENT(activation),
};

constexpr Argument<Transposition> TRANSPOSITION[] = {
    ARGUMENT(threads), ARGUMENT(rows), ARGUMENT(columns), ARGUMENT(from), ARGUMENT(to), ARGUMENT(stride),
};

// Assigns arguments by name, except None. Returns false with a Python error.
template <class Target, size_t COUNT>
bool read_named(const Argument<Target> (&arguments)[COUNT], PyObject* names, PyObject* const* values, Target& to) {
    for (Py_ssize_t n = 0; names && n < PyTuple_Size(names); n++) {
        const Argument<Target>* known = arguments;
        while (known < arguments + COUNT && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, n), known->name)) known++;
        if (known == arguments + COUNT) PyErr_Format(PyExc_TypeError, "unknown argument %R", PyTuple_GetItem(names, n));
        else if (values[n] != Py_None) known->assign(to, values[n]);
    }
    return !PyErr_Occurred();
}

// The bytes of a problem without addresses, which many calls share.
PyObject* plan(PyObject*, PyObject* const* values, Py_ssize_t, PyObject* names) {
    Problem p = {};
    p.low = -NO_LIMIT, p.high = p.stop = NO_LIMIT;
    if (!read_named(PLAN, names, values, p)) return nullptr;
    for (const int64_t size : {p.batch * p.heads, p.rows, p.keys, p.dim, p.value_dim})
        if (size >= INT_MAX) {
            PyErr_SetString(PyExc_ValueError, "rows, keys or heads are too many");
            return nullptr;
        }
    p.lse_head = p.rows, p.lse_batch = p.heads * p.rows;
    p.scale = static_cast<float>(p.exact_scale), p.softcap = static_cast<float>(p.exact_softcap);
    p.wide_output = p.wide_output || p.type == Type::float32;
    p.kept_factor = p.drop_below < 65536 ? 65536.f / static_cast<float>(65536 - p.drop_below) : 0;
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&p), sizeof p);
}

// Whether the starts of sequences rise from 0 to the number of all.
bool rise(const int64_t* starts, int64_t count, int64_t all) {
    if (!starts || starts[0] != 0 || starts[count] != all) return false;
    for (int64_t n = 0; n < count; n++)
        if (starts[n] > starts[n + 1]) return false;
    return true;
}

// Whether the boundaries of packed sequences can be read, if there are any. Returns false with a Python error.
bool has_sequences(const Problem& p) {
    if (!p.sequences) return true;
    if (rise(p.cu_seqlens_q, p.sequences, p.rows) && rise(p.cu_seqlens_k, p.sequences, p.keys)) return true;
    PyErr_SetString(PyExc_ValueError, "cu_seqlens: starts of sequences have to rise from 0 to the number of all");
    return false;
}

// Reads a plan, the number of an instruction set, and the arguments of a call in their order. Returns the functions to
// run the problem with, or null with a Python error.
const Kernels* read_call(PyObject* const* items, Py_ssize_t count, Problem& p) {
    memcpy(&p, PyBytes_AsString(items[0]), sizeof p);
    for (Py_ssize_t n = 2; n < count; n++) CALL[n - 2].assign(p, items[n]);
    if (p.offset.num_heads == 0) p.offset.num_heads = p.heads;
    if (p.keys >= INT_MAX) PyErr_SetString(PyExc_ValueError, "rows, keys or heads are too many");
    if (count > 2) has_sequences(p);
    return PyErr_Occurred() ? nullptr : INSTRUCTION_SETS[PyLong_AsLongLong(items[1])];
}

template <class Run>
PyObject* run_without_gil(const Run& run) {
    bool enough_memory = true;
    PyThreadState* state = PyEval_SaveThread();
    try {
        run();
    } catch (const std::bad_alloc&) {
        enough_memory = false;
    }
    PyEval_RestoreThread(state);
    return enough_memory ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

PyObject* forward(PyObject*, PyObject* const* items, Py_ssize_t count) {
    Problem p;
    const Kernels* kernels = read_call(items, count, p);
    return kernels ? run_without_gil([&] { run_forward(*kernels, p); }) : nullptr;
}

PyObject* backward(PyObject*, PyObject* const* items, Py_ssize_t count) {
    Problem p;
    const Kernels* kernels = read_call(items, count, p);
    p.exact_output = p.output;
    return kernels ? run_without_gil([&] { run_backward(*kernels, p); }) : nullptr;
}

// The arguments of a call with a bias from tables, all by name.
constexpr Argument<Problem> TABLES[] = {
    ARGUMENT(threads), ARGUMENT(lse), ARGUMENT(correction), {"seed", read_seed},
    ARGUMENT(cu_seqlens_q), ARGUMENT(cu_seqlens_k),
    ADDRESS(query), ADDRESS(key), ADDRESS(value), ADDRESS(output), ADDRESS(visible),
    ADDRESS(output_gradient), TO("output_gradient_strides", output_gradient),
    ADDRESS(query_gradient), ADDRESS(key_gradient), ADDRESS(value_gradient),
    TO("buckets", table_buckets), TO("groups", table_groups), ARGUMENT(bucket_of),
    OF_TABLE(query_table), OF_TABLE(key_table),
};

// Takes a plan, the number of an instruction set, and whether the backward pass is wanted.
PyObject* with_tables(PyObject*, PyObject* const* items, Py_ssize_t count, PyObject* names) {
    Problem p;
    const Kernels* kernels = read_call(items, 2, p);
    const bool backward = PyLong_AsLongLong(items[2]) != 0;
    if (!kernels || !read_named(TABLES, names, items + count, p) || !has_sequences(p)) return nullptr;
    p.exact_output = p.output;
    return run_without_gil([&] { backward ? run_backward(*kernels, p) : run_forward(*kernels, p); });
}

// Also takes the statistics by name.
PyObject* statistics(PyObject*, PyObject* const* items, Py_ssize_t count, PyObject* names) {
    Problem p;
    Statistics s = {};
    const Kernels* kernels = read_call(items, count, p);
    if (!kernels || !read_named(STATISTICS, names, items + count, s)) return nullptr;
    return run_without_gil([&] { run_statistics(*kernels, p, s); });
}

// Returns whether any row is fully masked, and any key masked for every row. Takes the arguments of the search, and then
// those of each mask.
PyObject* coverage(PyObject*, PyObject* const* items, Py_ssize_t count) {
    CoverageSearch s = {};
    Py_ssize_t next = 0;
    for (const Argument<CoverageSearch>& argument : COVERAGE) argument.assign(s, items[next++]);
    for (; next < count; s.count++)
        for (const Argument<Cells>& argument : CELLS) argument.assign(s.masks[s.count], items[next++]);
    if (PyErr_Occurred()) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    const FullyMasked masked = find_coverage(s);
    PyEval_RestoreThread(state);
    return Py_BuildValue("(NN)", PyBool_FromLong(masked.rows), PyBool_FromLong(masked.keys));
}

// Runs a pass over rows: the number of an instruction set, and the arguments in their order.
template <class Rows, size_t COUNT>
PyObject* run_rows(const Argument<Rows> (&arguments)[COUNT], void (*run)(const Kernels&, const Rows&), PyObject* const* items) {
    Rows rows = {};
    const Kernels* kernels = INSTRUCTION_SETS[PyLong_AsLongLong(*items)];
    for (const Argument<Rows>& argument : arguments) argument.assign(rows, *++items);
    return PyErr_Occurred() ? nullptr : run_without_gil([&] { run(*kernels, rows); });
}

PyObject* norm(PyObject*, PyObject* const* items, Py_ssize_t) { return run_rows(NORM, run_norm, items); }
PyObject* rotate(PyObject*, PyObject* const* items, Py_ssize_t) { return run_rows(ROTATION, run_rotation, items); }
PyObject* affine(PyObject*, PyObject* const* items, Py_ssize_t) { return run_rows(AFFINE, run_affine, items); }

PyObject* transpose(PyObject*, PyObject* const* items, Py_ssize_t) {
    return run_rows(TRANSPOSITION, run_transposition, items);
}

// Takes the bytes of an array of addresses.
PyObject* digest_of(PyObject*, PyObject* const* items, Py_ssize_t) {
    char* addresses = nullptr;
    Py_ssize_t bytes = 0;
    if (PyBytes_AsStringAndSize(items[0], &addresses, &bytes) < 0) return nullptr;
    const Py_ssize_t count = bytes / static_cast<Py_ssize_t>(sizeof(int64_t));
    return PyLong_FromUnsignedLongLong(digest(reinterpret_cast<const int64_t*>(addresses), count));
}

// Takes a list of dictionaries, and a list of tuples. Returns whether each dictionary holds the objects of its tuple.
PyObject* hold(PyObject*, PyObject* const* items, Py_ssize_t) {
    bool same = PyList_Size(items[0]) == PyList_Size(items[1]);
    for (Py_ssize_t n = 0; same && n < PyList_Size(items[0]); n++) {
        PyObject *key, *value, *fields = PyList_GetItem(items[0], n), *objects = PyList_GetItem(items[1], n);
        Py_ssize_t place = 0, next = 0;
        same = PyDict_Size(fields) == PyTuple_Size(objects);
        while (same && PyDict_Next(fields, &place, &key, &value)) same = value == PyTuple_GetItem(objects, next++);
    }
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(same);
}

// (number, name) of each instruction set of this processor, those with more features first.
PyObject* instruction_sets(PyObject*, PyObject*) {
    PyObject* sets = PyList_New(0);
    for (int64_t set = 0; sets && set < INSTRUCTION_SET_COUNT; set++) {
        if (!INSTRUCTION_SETS[set]->supported()) continue;
        PyObject* pair = Py_BuildValue("(ns)", static_cast<Py_ssize_t>(set), INSTRUCTION_SETS[set]->name);
        if (!pair || PyList_Append(sets, pair) < 0) Py_CLEAR(sets);
        Py_XDECREF(pair);
    }
    return sets;
}

template <class Function>
PyMethodDef method(const char* name, Function function, int flags) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr};
}

PyMethodDef methods[] = {
    method("plan", plan, METH_FASTCALL | METH_KEYWORDS),
    method("forward", forward, METH_FASTCALL),
    method("backward", backward, METH_FASTCALL),
    method("with_tables", with_tables, METH_FASTCALL | METH_KEYWORDS),
    method("statistics", statistics, METH_FASTCALL | METH_KEYWORDS),
    method("coverage", coverage, METH_FASTCALL),
    method("norm", norm, METH_FASTCALL),
    method("rotate", rotate, METH_FASTCALL),
    method("affine", affine, METH_FASTCALL),
    method("transpose", transpose, METH_FASTCALL),
    method("digest", digest_of, METH_FASTCALL),
    method("hold", hold, METH_FASTCALL),
    method("instruction_sets", instruction_sets, METH_NOARGS),
    {},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_attention", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

#ifdef _OPENMP
constexpr bool OPENMP = true;
#else
constexpr bool OPENMP = false;
#endif

template <class Target, size_t COUNT>
std::string names_of(const Argument<Target> (&arguments)[COUNT]) {
    std::string names;
    for (const Argument<Target>& argument : arguments) names += (names.empty() ? "" : ", ") + std::string(argument.name);
    return names;
}

#define TEXT(...) #__VA_ARGS__
#define EXPANDED_TEXT(...) TEXT(__VA_ARGS__)

bool add_constants(PyObject* module) {
    const std::string of_coverage = names_of(COVERAGE) + ", " + names_of(CELLS);
    return PyModule_AddStringConstant(module, "arguments", names_of(CALL).c_str()) == 0 &&
           PyModule_AddStringConstant(module, "coverage_arguments", of_coverage.c_str()) == 0 &&
           PyModule_AddStringConstant(module, "norm_arguments", names_of(NORM).c_str()) == 0 &&
           PyModule_AddStringConstant(module, "rotation_arguments", names_of(ROTATION).c_str()) == 0 &&
           PyModule_AddStringConstant(module, "affine_arguments", names_of(AFFINE).c_str()) == 0 &&
           PyModule_AddStringConstant(module, "activations", EXPANDED_TEXT(ACTIVATION_NAMES)) == 0 &&
           PyModule_AddStringConstant(module, "types", EXPANDED_TEXT(TYPE_NAMES)) == 0 &&
           PyModule_AddIntConstant(module, "MOST_MASKS", MOST_MASKS) == 0 &&
           PyModule_AddObjectRef(module, "openmp", OPENMP ? Py_True : Py_False) == 0 &&
           PyModule_AddObjectRef(module, "pairs_are_slow", pairs_are_slow() ? Py_True : Py_False) == 0;
}

}  // namespace
}  // namespace clearhead

PyMODINIT_FUNC PyInit__attention() {
    clearhead::stay_alone_after_fork();
    PyObject* module = PyModule_Create(&clearhead::definition);
    if (module && clearhead::add_constants(module)) return module;
    Py_XDECREF(module);
    return nullptr;
}
