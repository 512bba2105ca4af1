// Everything for one instruction set. The source that includes this defines what isa.h lists, and
// CPU_HAS_ISA, an expression that is true on processors that have it.
#pragma once
#include "backward.h"
#include "statistics.h"

namespace clearhead::ISA {

// f(zero of the type of the tensors)
template <class Work>
INLINE auto by_type(Type type, const Work& work) {
    switch (type) {
        case Type::bfloat16: return work(BFloat16());
        case Type::float16: return work(Float16());
        default: return work(float());
    }
}

static int64_t scratch_of_forward(const Problem& p, int64_t task_rows) {
    return by_type(p.type, [&](auto zero) { return forward_scratch<decltype(zero)>(p, task_rows); });
}

static void forward(const Problem& p, const Task& task, float* scratch) {
    by_type(p.type, [&](auto zero) { forward_typed<decltype(zero)>(p, task, scratch); });
}

static void decode(const Problem& p, const Task& task, float* partial, float* scratch) {
    by_type(p.type, [&](auto zero) { decode_typed<decltype(zero)>(p, task, partial, scratch); });
}

static void merge(const Problem& p, int64_t batch, int64_t kv_head, float* partials, int64_t count) {
    by_type(p.type, [&](auto zero) { merge_typed<decltype(zero)>(p, batch, kv_head, partials, count); });
}

static void backward(const Problem& p, const Task& task, float* sums, float* scratch) {
    by_type(p.type, [&](auto zero) { backward_typed<decltype(zero)>(p, task, sums, scratch); });
}

static void write_sums(const Problem& p, int64_t batch, int64_t kv_head, const float* sums, int64_t count) {
    by_type(p.type, [&](auto zero) { write_sums_typed<decltype(zero)>(p, batch, kv_head, sums, count); });
}

static void statistics(const Problem& p, const Statistics& s, const Task& task, const TaskSums& sums, float* scratch) {
    by_type(p.type, [&](auto zero) { statistics_typed<decltype(zero)>(p, s, task, sums, scratch); });
}

static bool supported() { return CPU_HAS_ISA; }

constexpr Kernels table(const char* name) {
    return {name,           TILE,         supported, masks_size, pack_masks,    scratch_of_forward, forward,
            decode_scratch, partial_size, decode,    merge,      backward_scratch, sums_size,          backward,
            write_sums,     statistics_scratch, statistics};
}

}  // namespace clearhead::ISA
