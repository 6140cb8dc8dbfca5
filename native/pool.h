// A pool of threads that share the work of one kernel call.
#ifndef OFFLOAD_POOL_H
#define OFFLOAD_POOL_H

#include <cstddef>

namespace offload {

// task(context, begin, end) works on elements [begin, end).
using RangeTask = void (*)(void* context, std::size_t begin, std::size_t end);

// Calls with `portion` elements or fewer run on the caller alone; longer ones are shared in portions of that many.
// By default: a multiple of kBlock, and of 64 B in every dtype: no two threads write to one cache line of an aligned
// buffer.
constexpr std::size_t kPortion = 65536;

// Runs task over [0, n) on up to `threads` threads, the caller among them, and returns when all is done.
// Which thread takes which portion is not fixed, so a task must not depend on it. When the pool is at work for another
// caller, or no thread can be started, the caller does the rest of the work itself.
//
// Note [Forks]
// A child of fork() has none of its parent's threads, and the pool's locks may have been held at that moment. So the
// child forgets the pool (a few hundred bytes stay behind) and makes its own at its first call. The pool is never
// destroyed either: at exit its threads sleep, and there is nothing to wait for.
void parallel_for(std::size_t n, int threads, RangeTask task, void* context, std::size_t portion = kPortion);

}  // namespace offload

#endif  // OFFLOAD_POOL_H
