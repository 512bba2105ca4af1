// Threads, and the memory that each keeps from call to call.
#pragma once
#include <stdint.h>
#include <stdlib.h>

namespace clearhead {

constexpr int64_t KEPT_FLOATS = 4 * 1024 * 1024;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The child of a fork has none of its parent's threads, and OpenMP would wait for them for ever.
void stay_alone_after_fork();
extern bool forked;

// Memory that a thread keeps from call to call, because fresh pages cost more than a small call.
class Scratch {
  public:
    ~Scratch() { free(memory_); }

    float* take(int64_t floats) {
        if (floats > size_) {
            free(memory_);
            const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 4095) / 4096 * 4096;
            memory_ = static_cast<float*>(aligned_alloc(4096, bytes));
            size_ = memory_ ? floats : 0;
        }
        return memory_;
    }

    void give_back() {
        if (size_ <= KEPT_FLOATS) return;
        free(memory_);
        memory_ = nullptr;
        size_ = 0;
    }

  private:
    float* memory_ = nullptr;
    int64_t size_ = 0;
};

inline thread_local Scratch scratch, mask_scratch;

// Calls work(index, scratch) for every index below `count`, in that order, each on the next free thread.
template <class Work>
bool parallel_for(int64_t count, int64_t threads, int64_t floats, const Work& work) {
    bool enough = true;
    if (threads > count) threads = count;
    if (threads <= 1 || forked) {
        float* memory = scratch.take(floats);
        for (int64_t index = 0; memory && index < count; index++) work(index, memory);
        scratch.give_back();
        return memory != nullptr;
    }
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(&& : enough)
    {
        float* memory = scratch.take(floats);
        enough = memory != nullptr;
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < count; index++)
            if (memory) work(index, memory);
        scratch.give_back();
    }
    return enough;
}

}  // namespace clearhead
