#include "plan.h"

#include <limits.h>

#include <initializer_list>

#include "arguments.h"
#include "call.h"

namespace clearhead {
namespace {

constexpr int64_t NO_LIMIT = int64_t(1) << 40;  // of a band: farther than any row is from any key

// What is the same for all calls, with null for every address.
struct PlanObject {
    PyObject_HEAD
    Problem problem;
    Documents documents;
    bool spans, visible, bias;  // whether calls may give such tensors
};

PlanObject* plan_of(PyObject* self) { return reinterpret_cast<PlanObject*>(self); }

void matrix(NamedArguments& args, const char* name, View& to, const View* otherwise = nullptr) {
    int64_t strides[3] = {};
    if (args.strides(name, strides, 3))
        to.batch = strides[0], to.head = strides[1], to.row = strides[2];
    else if (otherwise)
        to = *otherwise;
    else
        args.required(name);
}

bool mask(NamedArguments& args, const char* name, View& to) {
    int64_t strides[4] = {};
    if (!args.strides(name, strides, 4)) return false;
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

void read_masks(NamedArguments& args, PlanObject& plan) {
    Problem& p = plan.problem;
    p.low = args.integer_or("low", -NO_LIMIT), p.high = args.integer_or("high", NO_LIMIT);
    p.stop = args.integer_or("stop", p.keys);
    int64_t spans[2] = {};
    plan.spans = args.strides("spans", spans, 2);
    p.span_batch = spans[0], p.span_row = spans[1];
    plan.visible = mask(args, "visible", p.visible);
    plan.bias = mask(args, "bias", p.bias);
    int64_t gradient[3] = {};
    if (args.strides("bias_gradient", gradient, 3))
        p.bias_gradient.batch = gradient[0], p.bias_gradient.head = gradient[1], p.bias_gradient.row = gradient[2];
}

void read_documents(NamedArguments& args, PlanObject& plan) {
    Documents& documents = plan.documents;
    documents.count = args.integer_or("sequences", 0, 0);
    if (documents.count == 0) return;
    if (plan.problem.batch != 1) args.fail(PyExc_ValueError, "sequences", "lie in a batch of 1");
    if (plan.spans || plan.visible || plan.bias)
        args.fail(PyExc_ValueError, "sequences", "take no tensors of masks");
}

void read_plan(NamedArguments& args, PlanObject& plan) {
    Problem& p = plan.problem;
    read_sizes(args, p);
    p.exact_scale = args.real_or("scale", 1), p.exact_softcap = args.real_or("softcap", 0);
    p.scale = static_cast<float>(p.exact_scale), p.softcap = static_cast<float>(p.exact_softcap);
    matrix(args, "query", p.query), matrix(args, "key", p.key), matrix(args, "value", p.value);
    matrix(args, "output", p.output);
    matrix(args, "query_gradient", p.query_gradient, &p.query);
    matrix(args, "key_gradient", p.key_gradient, &p.key), matrix(args, "value_gradient", p.value_gradient, &p.value);
    p.wide_output = args.flag("wide_output") || p.type == Type::float32;
    read_masks(args, plan);
    const int64_t threshold = args.integer_or("dropout_threshold", 0, 0);
    if (threshold > 65536) args.fail(PyExc_ValueError, "dropout_threshold", "is above 65536");
    p.drop_below = static_cast<uint32_t>(threshold);
    p.kept_factor = threshold < 65536 ? 65536.f / static_cast<float>(65536 - threshold) : 0;
    read_documents(args, plan);
}

PyObject* create(PyTypeObject* type, PyObject* positional, PyObject* names) {
    if (PyTuple_Size(positional) != 0) {
        PyErr_SetString(PyExc_TypeError, "Plan takes its arguments by name");
        return nullptr;
    }
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    PlanObject& plan = *plan_of(self);
    plan.problem = Problem(), plan.documents = Documents();
    NamedArguments args("Plan", names);
    read_plan(args, plan);
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

// What all methods take first: operands, extras or None, how many threads, and which instruction set.
constexpr Py_ssize_t COMMON = 4;

bool read_call(const PlanObject& plan, PyObject* const* items, Py_ssize_t count, Py_ssize_t expected, Call& call) {
    if (count != expected) {
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return false;
    }
    Problem& p = call.problem;
    p = plan.problem, call.documents = plan.documents;
    if (!read_operands(items[0], call)) return false;
    if (items[1] != Py_None && !read_extras(items[1], call)) return false;
    call.threads = PyLong_AsLongLong(items[2]), call.set = PyLong_AsLongLong(items[3]);
    if (PyErr_Occurred()) return false;
    if (p.all_heads == 0) p.all_heads = p.heads;
    if (!p.visible.data) p.visible = View();  // whose strides would look like a mask's
    if (!p.bias.data) p.bias = View();
    return accept(p.first, plan.spans, "spans") && accept(p.visible.data, plan.visible, "visible") &&
           accept(p.bias.data, plan.bias, "bias");
}

bool check_call(const Call& call) {
    if (call.set < 0 || call.set >= INSTRUCTION_SET_COUNT || !INSTRUCTION_SETS[call.set]->supported()) {
        PyErr_SetString(PyExc_ValueError, "this processor does not have that instruction set");
        return false;
    }
    const Documents& documents = call.documents;
    if (documents.count == 0) return true;
    const Problem& p = call.problem;
    if (documents.rows && documents.keys && documents.fit(p.rows, p.keys)) return true;
    PyErr_SetString(PyExc_ValueError, "cu_seqlens: starts of sequences have to rise from 0 to the number of all");
    return false;
}

template <class Run>
PyObject* run_without_gil(const Call& call, const Run& run) {
    if (!check_call(call)) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    const bool enough = run(*INSTRUCTION_SETS[call.set]);
    PyEval_RestoreThread(state);
    if (!enough) return PyErr_NoMemory();
    return Py_NewRef(Py_None);
}

PyObject* forward(PyObject* self, PyObject* const* items, Py_ssize_t count) {
    Call call;
    if (!read_call(*plan_of(self), items, count, COMMON, call)) return nullptr;
    return run_without_gil(call, [&](const Kernels& kernels) {
        if (call.documents.count) return run_documents_forward(kernels, call.problem, call.documents, call.threads);
        return run_forward(kernels, call.problem, call.threads);
    });
}

// Then a sequence of what only the backward pass takes.
PyObject* backward(PyObject* self, PyObject* const* items, Py_ssize_t count) {
    Call call;
    if (!read_call(*plan_of(self), items, count, COMMON + 1, call) || !read_backward(items[COMMON], call)) return nullptr;
    Problem& p = call.problem;
    p.exact_output = p.output;
    if (!p.bias_gradient.data) p.bias_gradient = View();
    return run_without_gil(call, [&](const Kernels& kernels) {
        if (call.documents.count) return run_documents_backward(kernels, p, call.documents, call.threads);
        return run_backward(kernels, p, call.threads);
    });
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
    matrix(args, "weights_strides", s.weights, &s.weights);
    s.map = args.address<float>("map"), s.map_max = args.flag("map_max");
    s.map_rows = args.integer_or("map_rows", 0, 0), s.map_columns = args.integer_or("map_columns", 0, 0);
    s.sink = args.address<float>("sink"), s.first_keys = args.address<const int32_t>("first_keys");
    s.sink_keys = args.integer_or("sink_keys", 0, 0);
    s.distance = args.address<float>("distance"), s.shift = args.integer_or("shift", 0);
    s.stripes = args.address<float>("stripes"), s.offsets = args.address<const int64_t>("offsets");
    s.offset_count = args.integer_or("offset_count", 0, 0);
    s.exact = args.flag("exact");
}

// Then by name what is wanted of the weights.
PyObject* statistics(PyObject* self, PyObject* positional, PyObject* names) {
    PyObject* items[COMMON];
    const Py_ssize_t count = PyTuple_Size(positional);
    for (Py_ssize_t n = 0; n < count && n < COMMON; n++) items[n] = PyTuple_GetItem(positional, n);
    Call call;
    if (!read_call(*plan_of(self), items, count, COMMON, call)) return nullptr;
    if (call.documents.count) {
        PyErr_SetString(PyExc_ValueError, "statistics are not computed for packed sequences");
        return nullptr;
    }
    NamedArguments wanted("statistics", names);
    Statistics s = {};
    read_wanted(wanted, s);
    if (!wanted.finished()) return nullptr;
    return run_without_gil(
        call, [&](const Kernels& kernels) { return run_statistics(kernels, call.problem, s, call.threads); });
}

template <class Function>
PyCFunction method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

}  // namespace

bool add_plan_type(PyObject* module) {
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
    static PyType_Spec spec = {"clearhead._native._attention.Plan", sizeof(PlanObject), 0, Py_TPFLAGS_DEFAULT, slots};
    PyObject* type = PyType_FromSpec(&spec);
    const bool added = type && PyModule_AddObjectRef(module, "Plan", type) == 0;
    Py_XDECREF(type);
    return added;
}

}  // namespace clearhead
