// The least that a test program needs.
#ifndef OFFLOAD_TESTS_CHECK_H
#define OFFLOAD_TESTS_CHECK_H

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

#define CHECK_EQUAL(a, b)                                                                                           \
  do {                                                                                                              \
    const auto left = (a);                                                                                          \
    const auto right = (b);                                                                                         \
    if (!(left == right)) {                                                                                         \
      std::fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #a, static_cast<long long>(left), \
                   #b, static_cast<long long>(right));                                                              \
      std::exit(1);                                                                                                 \
    }                                                                                                               \
  } while (false)

// ThreadSanitizer does not support threads in the child of a process with threads.
#if defined(__SANITIZE_THREAD__)
#define OFFLOAD_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define OFFLOAD_TSAN 1
#endif
#endif

#define RUN(test)                     \
  do {                                \
    std::fprintf(stderr, #test "\n"); \
    test();                           \
  } while (false)

#endif  // OFFLOAD_TESTS_CHECK_H
