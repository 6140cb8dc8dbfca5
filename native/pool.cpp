#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace offload {
namespace {

// A caller may have asked its own thread for another rounding, or to flush subnormal numbers to zero
// (torch.set_flush_denormal); other threads would not know. Kernels run with the default environment on all of them.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&saved_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t saved_;
};

struct Job {
  RangeTask task;
  void* context;
  std::size_t n;
  std::size_t portion;
  std::atomic<std::size_t> next{0};  // first element that nobody has taken

  void work() {
    const DefaultFloats floats;
    for (;;) {
      const std::size_t begin = next.fetch_add(portion, std::memory_order_relaxed);
      if (begin >= n) return;
      task(context, begin, std::min(begin + portion, n));
    }
  }
};

class Pool {
 public:
  // False, with nothing done: the pool is at work for someone else.
  bool run(Job& job, int helpers) {
    const std::unique_lock<std::mutex> one_at_a_time(running_, std::try_to_lock);
    if (!one_at_a_time.owns_lock()) return false;
    start_threads(helpers);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      openings_ = std::min(helpers, threads_);
    }
    wake_.notify_all();
    job.work();
    // The work is all taken; those who have not joined need not, those who have must finish.
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    openings_ = 0;
    finished_.wait(lock, [this] { return at_work_ == 0; });
    return true;
  }

 private:
  void start_threads(int wanted) {
    for (; threads_ < wanted; ++threads_) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // a limit on threads: fewer share the work
      }
    }
  }

  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return openings_ > 0; });
      --openings_;
      ++at_work_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--at_work_ == 0) finished_.notify_one();
    }
  }

  std::mutex running_;  // held by the one caller that uses the threads
  int threads_ = 0;     // under running_
  std::mutex mutex_;    // guards what follows
  std::condition_variable wake_;
  std::condition_variable finished_;
  Job* job_ = nullptr;
  int openings_ = 0;  // threads that may still join job_
  int at_work_ = 0;
};

std::atomic<Pool*> the_pool{nullptr};

void forget_pool() {
  the_pool.store(nullptr, std::memory_order_relaxed);
}

Pool& pool() {
  Pool* found = the_pool.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;  // ENOMEM only: then a child of fork() would have to do without the kernels
  Pool* fresh = new Pool;
  if (the_pool.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *found;
}

}  // namespace

void parallel_for(std::size_t n, int threads, RangeTask task, void* context, std::size_t portion) {
  Job job{task, context, n, portion};
  const std::size_t portions = (n + portion - 1) / portion;
  const int useful = static_cast<int>(std::min<std::size_t>(portions, static_cast<std::size_t>(std::max(threads, 1))));
  if (useful > 1 && pool().run(job, useful - 1)) return;
  job.work();
}

}  // namespace offload
