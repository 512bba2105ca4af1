// The Python module, built for the stable ABI. It takes numbers and addresses, without PyTorch's types.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "call.h"
#include "coverage.h"
#include "parallel.h"

#ifdef COMPILES_PAIRS
#include <cpuid.h>
#endif

namespace clearhead {
namespace {

#ifdef COMPILES_PAIRS
Kernels with_pairs(const Kernels& pairs) {
    Kernels result = avx512_kernels;
    result.name = pairs.name, result.supported = pairs.supported, result.pairs = true;
    result.forward_scratch = pairs.forward_scratch, result.forward[bfloat16] = pairs.forward[bfloat16];
    result.backward_scratch = pairs.backward_scratch, result.backward[bfloat16] = pairs.backward[bfloat16];
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

// Returns whether any row is fully masked, and any key masked for every row. Takes sizes, a band, two addresses to write
// visible rows and keys to, and for each mask the address, size and hidden value of its cells, and four strides.
PyObject* coverage(PyObject*, PyObject* const* items, Py_ssize_t count) {
    constexpr Py_ssize_t FIRST = 9, OF_MASK = 7;
    int64_t numbers[FIRST + OF_MASK * MOST_MASKS];
    if (count < FIRST || count > FIRST + OF_MASK * MOST_MASKS || (count - FIRST) % OF_MASK) {
        PyErr_SetString(PyExc_TypeError, "wrong number of addresses");
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < count; i++) numbers[i] = PyLong_AsLongLong(items[i]);
    if (PyErr_Occurred()) return nullptr;
    CoverageSearch s = {};
    s.batch = numbers[0], s.heads = numbers[1], s.rows = numbers[2], s.keys = numbers[3];
    s.low = numbers[4], s.high = numbers[5], s.stop = numbers[6];
    s.rows_seen = reinterpret_cast<uint8_t*>(numbers[7]), s.keys_seen = reinterpret_cast<uint8_t*>(numbers[8]);
    for (const int64_t* m = numbers + FIRST; m < numbers + count; m += OF_MASK)
        s.masks[s.count++] = {reinterpret_cast<const void*>(m[0]), m[1], static_cast<uint64_t>(m[2]),
                              m[3], m[4], m[5], m[6]};
    PyThreadState* state = PyEval_SaveThread();
    const FullyMasked masked = find_coverage(s);
    PyEval_RestoreThread(state);
    return Py_BuildValue("(NN)", PyBool_FromLong(masked.rows), PyBool_FromLong(masked.keys));
}

// On processors with tile registers `vdpbf16ps` is slow, and float32 is 1.6 times as fast (measured). Processors without
// tile registers run it at full rate. CPUID does not report throughput.
bool pairs_are_slow() {
#ifdef COMPILES_PAIRS
    constexpr unsigned TILES_OF_BFLOAT16 = 1u << 22;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILES_OF_BFLOAT16);
#else
    return false;
#endif
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
    if (module && clearhead::add_problem_type(module) && clearhead::add_constants(module)) return module;
    Py_XDECREF(module);
    return nullptr;
}
