#include "arguments.h"
#include "call.h"

#include <limits.h>

#include <initializer_list>
#include <new>

namespace clearhead {
namespace {

constexpr int64_t NO_LIMIT = int64_t(1) << 40;  // of a band: more than any distance of a row and a key

// A problem with null addresses, which many calls share.
struct ProblemObject {
    PyObject_HEAD
    Problem problem;
};

Problem& problem_of(PyObject* self) { return reinterpret_cast<ProblemObject*>(self)->problem; }

// Reads the strides of batch, heads, rows and, if `count` is 4, columns. False if they are not given.
bool read_view(NamedArguments& args, const char* name, View& to, Py_ssize_t count = 3) {
    int64_t strides[4] = {0, 0, 0, to.column};
    if (!args.strides(name, strides, count)) return false;
    to.batch = strides[0], to.head = strides[1], to.row = strides[2], to.column = strides[3];
    return true;
}

void read_sizes(NamedArguments& args, Problem& p) {
    static const char* const TYPES[] = {"float32", "bfloat16", "float16"};
    PyObject* type = args.required("dtype");
    int64_t number = -1;
    for (int64_t n = 0; type && n < 3; n++)
        if (PyUnicode_Check(type) && PyUnicode_CompareWithASCIIString(type, TYPES[n]) == 0) number = n;
    if (number < 0) args.fail(PyExc_ValueError, "dtype", "is not 'float32', 'bfloat16' or 'float16'");
    p.type = static_cast<Type>(number);
    p.batch = args.integer("batch", 0), p.heads = args.integer("heads", 0), p.kv_heads = args.integer("kv_heads", 0);
    p.rows = args.integer("rows", 0), p.keys = args.integer("keys", 0);
    p.dim = args.integer("dim", 0), p.value_dim = args.integer("value_dim", 0);
    if (p.heads > 0 && (p.kv_heads == 0 || p.heads % p.kv_heads != 0))
        args.fail(PyExc_ValueError, "heads", "is not a multiple of kv_heads");
    for (const int64_t size : {p.batch * p.heads, p.rows, p.keys, p.dim, p.value_dim})
        if (size >= INT_MAX) args.fail(PyExc_ValueError, "rows, keys or heads", "are too many");
    p.lse_head = p.rows, p.lse_batch = p.heads * p.rows;
}

void read_masks(NamedArguments& args, Problem& p) {
    p.low = args.integer_or("low", -NO_LIMIT), p.high = args.integer_or("high", NO_LIMIT);
    p.stop = args.integer_or("stop", p.keys);
    int64_t ranges[2] = {};
    p.takes_ranges = args.strides("spans", ranges, 2);
    p.range_batch = ranges[0], p.range_row = ranges[1];
    p.takes_visible = read_view(args, "visible", p.visible, 4);
    p.takes_bias = read_view(args, "bias", p.bias, 4);
    read_view(args, "bias_gradient", p.bias_gradient);
}

void read_sequences(NamedArguments& args, Problem& p) {
    p.sequences = args.integer_or("sequences", 0, 0);
    if (p.sequences == 0) return;
    if (p.batch != 1) args.fail(PyExc_ValueError, "sequences", "lie in a batch of 1");
    if (p.takes_ranges || p.takes_visible || p.takes_bias)
        args.fail(PyExc_ValueError, "sequences", "take no tensors of masks");
}

void read_problem(NamedArguments& args, Problem& p) {
    read_sizes(args, p);
    p.exact_scale = args.real_or("scale", 1), p.exact_softcap = args.real_or("softcap", 0);
    p.scale = static_cast<float>(p.exact_scale), p.softcap = static_cast<float>(p.exact_softcap);
    if (!read_view(args, "query", p.query)) args.required("query");
    if (!read_view(args, "key", p.key)) args.required("key");
    if (!read_view(args, "value", p.value)) args.required("value");
    if (!read_view(args, "output", p.output)) args.required("output");
    p.query_gradient = p.query, p.key_gradient = p.key, p.value_gradient = p.value;
    read_view(args, "query_gradient", p.query_gradient);
    read_view(args, "key_gradient", p.key_gradient), read_view(args, "value_gradient", p.value_gradient);
    p.wide_output = args.flag("wide_output") || p.type == Type::float32;
    read_masks(args, p);
    const int64_t threshold = args.integer_or("dropout_threshold", 0, 0);
    if (threshold > 65536) args.fail(PyExc_ValueError, "dropout_threshold", "is above 65536");
    p.drop_below = static_cast<uint32_t>(threshold);
    p.kept_factor = threshold < 65536 ? 65536.f / static_cast<float>(65536 - threshold) : 0;
    read_sequences(args, p);
}

PyObject* create(PyTypeObject* type, PyObject* positional, PyObject* names) {
    if (PyTuple_Size(positional) != 0) {
        PyErr_SetString(PyExc_TypeError, "Problem takes its arguments by name");
        return nullptr;
    }
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    problem_of(self) = Problem();
    NamedArguments args("Problem", names);
    read_problem(args, problem_of(self));
    if (args.finished()) return self;
    Py_DECREF(self);
    return nullptr;
}

void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

bool accept(const void* address, bool planned, const char* name) {
    if (!address || planned) return true;
    PyErr_Format(PyExc_ValueError, "the plan was made without %s", name);
    return false;
}

// All methods take operands, extras or None, the number of threads, and the instruction set.
constexpr Py_ssize_t COMMON = 4;

// Whether the starts of sequences rise from 0 to the number of all.
bool rise(const int64_t* starts, int64_t count, int64_t all) {
    if (!starts || starts[0] != 0 || starts[count] != all) return false;
    for (int64_t n = 0; n < count; n++)
        if (starts[n] > starts[n + 1]) return false;
    return true;
}

// Adds the addresses of a call to its problem. Returns the functions to run it with, or null with a Python error.
const Kernels* read_call(PyObject* self, PyObject* const* items, Py_ssize_t count, Py_ssize_t expected, Problem& p) {
    if (count != expected) {
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return nullptr;
    }
    p = problem_of(self);
    if (!read_operands(items[0], p)) return nullptr;
    if (items[1] != Py_None && !read_extras(items[1], p)) return nullptr;
    p.threads = PyLong_AsLongLong(items[2]);
    const int64_t set = PyLong_AsLongLong(items[3]);
    if (PyErr_Occurred()) return nullptr;
    if (p.all_heads == 0) p.all_heads = p.heads;
    if (!p.visible.data) p.visible = View();  // without strides, which would count as a mask
    if (!p.bias.data) p.bias = View();
    if (!accept(p.first, p.takes_ranges, "spans") || !accept(p.visible.data, p.takes_visible, "visible") ||
        !accept(p.bias.data, p.takes_bias, "bias"))
        return nullptr;
    if (set < 0 || set >= INSTRUCTION_SET_COUNT || !INSTRUCTION_SETS[set]->supported())
        PyErr_SetString(PyExc_ValueError, "this processor does not have that instruction set");
    else if (p.sequences && !(rise(p.row_starts, p.sequences, p.rows) && rise(p.key_starts, p.sequences, p.keys)))
        PyErr_SetString(PyExc_ValueError, "cu_seqlens: starts of sequences have to rise from 0 to the number of all");
    else
        return INSTRUCTION_SETS[set];
    return nullptr;
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

PyObject* forward(PyObject* self, PyObject* const* items, Py_ssize_t count) {
    Problem p;
    const Kernels* kernels = read_call(self, items, count, COMMON, p);
    return kernels ? run_without_gil([&] { run_forward(*kernels, p); }) : nullptr;
}

// Also takes the sequence of arguments of the backward pass.
PyObject* backward(PyObject* self, PyObject* const* items, Py_ssize_t count) {
    Problem p;
    const Kernels* kernels = read_call(self, items, count, COMMON + 1, p);
    if (!kernels || !read_backward(items[COMMON], p)) return nullptr;
    p.exact_output = p.output;
    if (!p.bias_gradient.data) p.bias_gradient = View();
    return run_without_gil([&] { run_backward(*kernels, p); });
}

void read_wanted(NamedArguments& args, Statistics& s) {
    s.counted = args.address<const uint8_t>("counted");
    s.largest = args.address<float>("largest"), s.visible = args.address<float>("visible");
    s.raw = args.address<float>("raw");
    s.entropy = args.address<float>("entropy"), s.confidence = args.address<float>("confidence");
    s.norm = args.address<float>("norm");
    s.received = args.address<float>("received"), s.viewers = args.address<float>("viewers");
    s.top_weights = args.address<float>("top_weights"), s.top_keys = args.address<int64_t>("top_keys");
    s.top = args.integer_or("top", 0, 0);
    s.weights.data = args.address<void>("weights");
    read_view(args, "weights_strides", s.weights);
    s.map = args.address<float>("map"), s.map_max = args.flag("map_max");
    s.map_rows = args.integer_or("map_rows", 0, 0), s.map_columns = args.integer_or("map_columns", 0, 0);
    s.sink = args.address<float>("sink"), s.first_keys = args.address<const int32_t>("first_keys");
    s.sink_keys = args.integer_or("sink_keys", 0, 0);
    s.distance = args.address<float>("distance"), s.shift = args.integer_or("shift", 0);
    s.stripes = args.address<float>("stripes"), s.offsets = args.address<const int64_t>("offsets");
    s.offset_count = args.integer_or("offset_count", 0, 0);
    s.exact = args.flag("exact");
}

// Also takes the statistics by name.
PyObject* statistics(PyObject* self, PyObject* positional, PyObject* names) {
    PyObject* items[COMMON];
    const Py_ssize_t count = PyTuple_Size(positional);
    for (Py_ssize_t n = 0; n < count && n < COMMON; n++) items[n] = PyTuple_GetItem(positional, n);
    Problem p;
    const Kernels* kernels = read_call(self, items, count, COMMON, p);
    if (!kernels) return nullptr;
    if (p.sequences) {
        PyErr_SetString(PyExc_ValueError, "statistics are not computed for packed sequences");
        return nullptr;
    }
    NamedArguments wanted("statistics", names);
    Statistics s = {};
    read_wanted(wanted, s);
    if (!wanted.finished()) return nullptr;
    return run_without_gil([&] { run_statistics(*kernels, p, s); });
}

template <class Function>
PyCFunction method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

}  // namespace

bool add_problem_type(PyObject* module) {
    static PyMethodDef methods[] = {
        {"forward", method(forward), METH_FASTCALL, nullptr},
        {"backward", method(backward), METH_FASTCALL, nullptr},
        {"statistics", method(statistics), METH_VARARGS | METH_KEYWORDS, nullptr},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(create)},
        {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
        {Py_tp_methods, methods},
        {0, nullptr},
    };
    static PyType_Spec spec = {"clearhead._native._attention.Problem", sizeof(ProblemObject), 0, Py_TPFLAGS_DEFAULT,
                               slots};
    PyObject* type = PyType_FromSpec(&spec);
    const bool added = type && PyModule_AddObjectRef(module, "Problem", type) == 0;
    Py_XDECREF(type);
    return added;
}

}  // namespace clearhead
