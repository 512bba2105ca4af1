#include "parallel.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace clearhead {

bool forked = false;

void stay_alone_after_fork() {
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
}

}  // namespace clearhead
