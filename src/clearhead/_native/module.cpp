// The Python module: whole numbers, addresses and factors in, nothing of torch. Built for the stable ABI.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "arguments.h"
#include "call.h"
#include "coverage.h"
#include "parallel.h"
#include "plan.h"

#ifdef COMPILES_PAIRS
#include <cpuid.h>
#endif

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

}  // namespace

const Kernels* const INSTRUCTION_SETS[] = {
#ifdef COMPILES_AMX
    &amx_kernels,
#endif
#ifdef COMPILES_PAIRS
    &avx512_bf16_kernels,
#endif
#ifdef __x86_64__
    &avx512_kernels,      &avx2_kernels,
#endif
#ifdef __aarch64__
    &neon_kernels,
#endif
    &generic_kernels};
const int64_t INSTRUCTION_SET_COUNT = sizeof INSTRUCTION_SETS / sizeof *INSTRUCTION_SETS;

namespace {

// Whether any row is fully masked, and any key masked for every row; which they are, as bytes. Takes sizes, a band, two
// addresses, and for each mask the address, size and hidden value of its cells, and four strides.
PyObject* coverage(PyObject*, PyObject* const* items, Py_ssize_t count) {
    constexpr Py_ssize_t FIRST = 9, OF_MASK = 7;
    Addresses args(items, count);
    CoverageSearch s = {};
    s.batch = args.integer(), s.heads = args.integer(), s.rows = args.integer(), s.keys = args.integer();
    s.low = args.integer(), s.high = args.integer(), s.stop = args.integer();
    s.rows_seen = args.pointer<uint8_t>(), s.keys_seen = args.pointer<uint8_t>();
    for (; FIRST + s.count * OF_MASK < count && s.count < MOST_MASKS; s.count++) {
        Cells& cells = s.masks[s.count];
        cells.data = args.pointer<const void>(), cells.bytes = args.integer();
        cells.hidden = static_cast<uint64_t>(args.integer());
        cells.batch = args.integer(), cells.head = args.integer(), cells.row = args.integer();
        cells.column = args.integer();
    }
    if (!args.finished()) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    const FullyMasked found = find_coverage(s);
    PyEval_RestoreThread(state);
    return Py_BuildValue("(NN)", PyBool_FromLong(found.rows), PyBool_FromLong(found.keys));
}

// Processors with tile registers leave products of bfloat16 to them, and take so long for `vdpbf16ps` that plain float32 is
// faster (1.6 times, measured); those without are built for it. Throughput itself is no feature that CPUID reports.
bool pairs_are_slow() {
#ifdef COMPILES_PAIRS
    constexpr unsigned TILES_OF_BFLOAT16 = 1u << 22;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILES_OF_BFLOAT16);
#else
    return false;
#endif
}

// (number, name) of each instruction set that this processor has, the one with the most features first.
PyObject* instruction_sets(PyObject*, PyObject*) {
    PyObject* found = PyList_New(0);
    for (int64_t set = 0; found && set < INSTRUCTION_SET_COUNT; set++) {
        if (!INSTRUCTION_SETS[set]->supported()) continue;
        PyObject* pair = Py_BuildValue("(ns)", static_cast<Py_ssize_t>(set), INSTRUCTION_SETS[set]->name);
        if (!pair || PyList_Append(found, pair) < 0) Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    return found;
}

PyMethodDef methods[] = {
    {"coverage", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(coverage)), METH_FASTCALL, nullptr},
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_attention", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

#ifdef _OPENMP
constexpr bool OPENMP = true;
#else
constexpr bool OPENMP = false;
#endif

bool add_constants(PyObject* module) {
    PyObject* arguments = argument_names();
    const bool added = arguments && PyModule_AddObjectRef(module, "arguments", arguments) == 0;
    Py_XDECREF(arguments);
    return added && PyModule_AddIntConstant(module, "MOST_MASKS", MOST_MASKS) == 0 &&
           PyModule_AddObjectRef(module, "openmp", OPENMP ? Py_True : Py_False) == 0 &&
           PyModule_AddObjectRef(module, "pairs_are_slow", pairs_are_slow() ? Py_True : Py_False) == 0;
}

}  // namespace
}  // namespace clearhead

PyMODINIT_FUNC PyInit__attention() {
    clearhead::stay_alone_after_fork();
    PyObject* module = PyModule_Create(&clearhead::definition);
    if (module && clearhead::add_plan_type(module) && clearhead::add_constants(module)) return module;
    Py_XDECREF(module);
    return nullptr;
}
