// Threads, and the memory that each keeps from call to call.
#pragma once
#include <stdlib.h>
#if !defined(_WIN32)
#include <pthread.h>
#include <sys/mman.h>
#endif

#include <memory>
#include <new>

#include "problem.h"

namespace clearhead {

constexpr int64_t KEPT_FLOATS = 4 * 1024 * 1024;
constexpr size_t LARGE_PAGE = 2 * 1024 * 1024;

// A forked child has none of its parent's threads, and OpenMP would wait for them forever.
inline bool forked = false;

inline void stay_alone_after_fork() {
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
}

// Memory that a thread keeps from call to call, because fresh pages cost more than a small call.
class Scratch {
  public:
    ~Scratch() { free(memory_); }

    float* take(int64_t floats) {
        if (floats > size_) {
            free(memory_);
            const size_t wanted = static_cast<size_t>(floats) * sizeof(float), page = wanted < LARGE_PAGE ? 4096 : LARGE_PAGE;
            const size_t bytes = (wanted + page - 1) / page * page;
            memory_ = static_cast<float*>(aligned_alloc(page, bytes));
#ifdef MADV_HUGEPAGE  // tables are read at places far apart, each in a small page of its own
            if (memory_ && page == LARGE_PAGE) madvise(memory_, bytes, MADV_HUGEPAGE);
#endif
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

struct Free {
    void operator()(void* memory) const { free(memory); }
};

// Zeros. Pages of a large array are allocated on first use.
template <class T>
std::unique_ptr<T[], Free> zeros(int64_t count) {
    T* memory = static_cast<T*>(calloc(static_cast<size_t>(count) + 1, sizeof(T)));
    if (!memory) throw std::bad_alloc();
    return std::unique_ptr<T[], Free>(memory);
}

// Calls work(index, scratch) for every index below `count`, in that order, each on the next free thread.
template <class Work>
void parallel_for(int64_t count, int64_t threads, int64_t floats, const Work& work) {
    bool enough = true;
    threads = smaller(threads, count);
    if (threads <= 1 || forked) {
        float* memory = scratch.take(floats);
        enough = memory != nullptr;
        for (int64_t index = 0; enough && index < count; index++) work(index, memory);
        scratch.give_back();
    } else {
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(&& : enough)
        {
            float* memory = scratch.take(floats);
            enough = memory != nullptr;
#pragma omp for schedule(dynamic, 1)
            for (int64_t index = 0; index < count; index++) {
                try {  // no exception may leave a parallel region
                    if (memory) work(index, memory);
                } catch (const std::bad_alloc&) {
                    enough = false;
                }
            }
            scratch.give_back();
        }
    }
    if (!enough) throw std::bad_alloc();
}

}  // namespace clearhead
