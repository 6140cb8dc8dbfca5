// What one instruction set offers. Everything here is plain data: this header is included by files compiled for
// different instruction sets, so it may hold no function (the linker would keep one copy of it, perhaps the widest).
#ifndef OFFLOAD_KERNELS_H
#define OFFLOAD_KERNELS_H

#include <cstddef>
#include <cstdint>

#include "offload_native.h"

namespace offload {

// Sums of squares are made per block of kBlock elements, so that their order does not depend on how threads share them.
constexpr std::size_t kBlock = 4096;

struct AccumulateArgs {
  void* target;
  const void* source;
  std::int32_t target_dtype;
  std::int32_t source_dtype;
  bool add;
  double* blocks;  // one sum per block of the target
};

struct TrafficArgs {
  float* param;
  const std::uint16_t* grad;
  float* exp_avg;
  float* exp_avg_sq;
  std::uint16_t* out;
};

struct Kernels {
  const char* name;
  // Elements [begin, end) of an update. False: no kernel for these dtypes.
  bool (*adam)(const offload_adam_args& args, std::size_t begin, std::size_t end);
  // One sum per block of x[0, n): writes ceil(n / kBlock) values. False: no kernel for this dtype.
  bool (*sum_squares)(const void* x, std::int32_t dtype, std::size_t n, double* blocks);
  // Elements [begin, end), where begin is the first of a block. False: no kernel for these dtypes.
  bool (*accumulate)(const AccumulateArgs& args, std::size_t begin, std::size_t end);
  void (*traffic)(const TrafficArgs& args, std::size_t begin, std::size_t end);
};

extern const Kernels kernels_baseline;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

}  // namespace offload

#endif  // OFFLOAD_KERNELS_H
