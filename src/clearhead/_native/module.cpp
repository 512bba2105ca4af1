// The Python module: whole numbers, pointers and factors in, nothing of torch. Built for the stable ABI.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "driver.h"
#include "reach.h"

namespace clearhead {
namespace {

#ifdef COMPILES_PAIRS
Kernels with_pairs(const PairKernels& pairs) {
    Kernels result = avx512_kernels;
    result.name = pairs.name, result.supported = pairs.supported;
    result.forward_scratch = pairs.forward_scratch, result.forward = pairs.forward;
    result.backward_scratch = pairs.backward_scratch, result.backward = pairs.backward;
    result.pairs = true;
    return result;
}

#ifdef COMPILES_AMX
const Kernels amx_kernels = with_pairs(amx_pairs);
#endif
const Kernels avx512_bf16_kernels = with_pairs(avx512_bf16_pairs);
#endif

// The best first, where pairs of bfloat16 are fast.
const Kernels* const ALL[] = {
#ifdef COMPILES_AMX
    &amx_kernels,
#endif
#ifdef COMPILES_PAIRS
    &avx512_bf16_kernels,
#endif
#ifdef __x86_64__
    &avx512_kernels,      &avx2_kernels,
#endif
    &generic_kernels};

// Reads the arguments of a call one after the other; what is no number leaves a Python error behind.
class Arguments {
  public:
    Arguments(PyObject* const* items, Py_ssize_t count) : items_(items), left_(count) {}

    int64_t integer() { return left_-- > 0 ? PyLong_AsLongLong(*items_++) : -1; }
    float real() { return left_-- > 0 ? static_cast<float>(PyFloat_AsDouble(*items_++)) : 0; }
    template <class T>
    T* pointer() {
        return reinterpret_cast<T*>(integer());
    }
    View matrix() {
        View view;
        view.data = pointer<void>();
        view.batch = integer(), view.head = integer(), view.row = integer();
        return view;
    }
    View mask() {
        View view = matrix();
        view.column = integer();
        return view;
    }
    bool more() const { return left_ > 0; }
    bool finished() {
        if (left_ != 0 && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return !PyErr_Occurred();
    }

  private:
    PyObject* const* items_;
    Py_ssize_t left_;
};

// The part that forward and backward have in common, in the order in which kernels/native.py gives it.
Problem read_problem(Arguments& args) {
    Problem p = {};
    p.type = static_cast<Type>(args.integer());
    p.batch = args.integer(), p.heads = args.integer(), p.kv_heads = args.integer();
    p.rows = args.integer(), p.keys = args.integer(), p.dim = args.integer(), p.value_dim = args.integer();
    p.scale = args.real(), p.softcap = args.real();
    p.query = args.matrix(), p.key = args.matrix(), p.value = args.matrix();
    p.lse = args.pointer<double>(), p.sinks = args.pointer<const float>();
    p.low = args.integer(), p.high = args.integer(), p.stop = args.integer();
    p.first = args.pointer<const int32_t>(), p.last = args.pointer<const int32_t>();
    p.span_batch = args.integer(), p.span_row = args.integer();
    p.visible = args.mask(), p.bias = args.mask();
    p.drop_below = static_cast<uint32_t>(args.integer()), p.seed = static_cast<uint64_t>(args.integer());
    p.kept_factor = args.real();
    return p;
}

template <class Run>
PyObject* run_without_gil(Arguments& args, const Problem& p, int64_t set, int64_t threads, Run run) {
    if (!args.finished()) return nullptr;
    if (set < 0 || set >= static_cast<int64_t>(sizeof ALL / sizeof *ALL) || !ALL[set]->supported()) {
        PyErr_SetString(PyExc_ValueError, "this processor does not have that instruction set");
        return nullptr;
    }
    PyThreadState* state = PyEval_SaveThread();
    const bool enough = run(*ALL[set], p, threads);
    PyEval_RestoreThread(state);
    if (!enough) return PyErr_NoMemory();
    return Py_NewRef(Py_None);
}

// What is done where masks leave queries or keys out: nothing; the request is left to others, who are told so; or their
// rows, in the forward pass, and the rows of their gradients in the backward pass, are set to zero.
enum class Leaving : int64_t { nobody, to_others, out };

PyObject* forward(PyObject*, PyObject* const* items, Py_ssize_t count) {
    Arguments args(items, count);
    const int64_t set = args.integer(), threads = args.integer();
    Problem p = read_problem(args);
    p.output = args.matrix(), p.wide_output = args.integer() != 0;
    const Leaving leaving = static_cast<Leaving>(args.integer());
    bool any = false;
    PyObject* done = run_without_gil(args, p, set, threads, [&](const Kernels& kernels, const Problem& q, int64_t many) {
        if (leaving != Leaving::nobody) {
            const Absent absent(q);
            if (!absent.enough_memory()) return false;
            any = absent.any();
            if (any && leaving == Leaving::to_others) return true;
            absent.clear(q.query, q.key, q.value);
        }
        return run_forward(kernels, q, many);
    });
    if (!done) return nullptr;
    Py_DECREF(done);
    return PyBool_FromLong(any);
}

PyObject* backward(PyObject*, PyObject* const* items, Py_ssize_t count) {
    Arguments args(items, count);
    const int64_t set = args.integer(), threads = args.integer();
    Problem p = read_problem(args);
    p.output_gradient = args.matrix(), p.exact_output = args.matrix();
    p.query_gradient = args.matrix(), p.key_gradient = args.matrix(), p.value_gradient = args.matrix();
    p.lse_gradient = args.pointer<const float>(), p.correction = args.pointer<float>();
    p.bias_gradient = args.matrix();
    const Leaving leaving = static_cast<Leaving>(args.integer());
    return run_without_gil(args, p, set, threads, [&](const Kernels& kernels, const Problem& q, int64_t many) {
        if (!run_backward(kernels, q, many)) return false;
        if (leaving == Leaving::nobody) return true;
        const Absent absent(q);
        if (!absent.enough_memory()) return false;
        absent.clear(q.query_gradient, q.key_gradient, q.value_gradient);
        return true;
    });
}

PyObject* statistics(PyObject*, PyObject* const* items, Py_ssize_t count) {
    Arguments args(items, count);
    const int64_t set = args.integer(), threads = args.integer();
    Problem p = read_problem(args);
    p.output = args.matrix();
    Statistics s = {};
    s.counted = args.pointer<const uint8_t>();
    s.largest = args.pointer<float>(), s.visible = args.pointer<float>();
    s.entropy = args.pointer<float>(), s.confidence = args.pointer<float>(), s.norm = args.pointer<float>();
    s.received = args.pointer<float>(), s.viewers = args.pointer<float>();
    s.top_weights = args.pointer<float>(), s.top_keys = args.pointer<int64_t>(), s.top = args.integer();
    s.weights = args.matrix();
    s.map = args.pointer<float>(), s.map_rows = args.integer(), s.map_columns = args.integer();
    s.map_peaks = args.integer() != 0;
    return run_without_gil(args, p, set, threads, [&](const Kernels& kernels, const Problem& problem, int64_t many) {
        return run_statistics(kernels, problem, s, many);
    });
}

// Which queries and keys take part, as bytes; returns whether any query and any key is left out.
PyObject* reach(PyObject*, PyObject* const* items, Py_ssize_t count) {
    Arguments args(items, count);
    Sought s = {};
    s.batch = args.integer(), s.heads = args.integer(), s.rows = args.integer(), s.keys = args.integer();
    s.low = args.integer(), s.high = args.integer(), s.stop = args.integer();
    s.queries = args.pointer<uint8_t>(), s.seen = args.pointer<uint8_t>();
    for (; args.more() && s.count < MOST_MASKS; s.count++) {
        Cells& cells = s.masks[s.count];
        cells.data = args.pointer<const void>(), cells.bytes = args.integer();
        cells.hidden = static_cast<uint64_t>(args.integer());
        cells.batch = args.integer(), cells.head = args.integer(), cells.row = args.integer();
        cells.column = args.integer();
    }
    if (!args.finished()) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    const LeftOut found = find_reach(s);
    PyEval_RestoreThread(state);
    return Py_BuildValue("(NN)", PyBool_FromLong(found.queries), PyBool_FromLong(found.keys));
}

// Intel's processors take so long for `vdpbf16ps` that plain float32 is faster there (1.6 times, measured on one with AMX).
PyObject* pairs_are_slow(PyObject*, PyObject*) {
#ifdef COMPILES_PAIRS
    __builtin_cpu_init();
    return PyBool_FromLong(__builtin_cpu_is("intel"));
#else
    return PyBool_FromLong(0);
#endif
}

// (number, name) of each instruction set that this processor has, the best first where pairs of bfloat16 are fast.
PyObject* instruction_sets(PyObject*, PyObject*) {
    PyObject* found = PyList_New(0);
    for (size_t set = 0; found && set < sizeof ALL / sizeof *ALL; set++) {
        if (!ALL[set]->supported()) continue;
        PyObject* pair = Py_BuildValue("(ns)", static_cast<Py_ssize_t>(set), ALL[set]->name);
        if (!pair || PyList_Append(found, pair) < 0) Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    return found;
}

PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL, nullptr},
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(backward)), METH_FASTCALL, nullptr},
    {"statistics", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(statistics)), METH_FASTCALL, nullptr},
    {"reach", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(reach)), METH_FASTCALL, nullptr},
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {"pairs_are_slow", pairs_are_slow, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_attention", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace clearhead

PyMODINIT_FUNC PyInit__attention() {
    clearhead::stay_alone_after_fork();
    return PyModule_Create(&clearhead::definition);
}
