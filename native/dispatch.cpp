#include "dispatch.h"

namespace offload {
namespace {

Sets find_sets() {
  Sets sets;
#if defined(OFFLOAD_X86_SETS)
  // These also ask the operating system whether it saves the wide registers (XGETBV).
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    sets.list[sets.count++] = &kernels_avx512;
  }
  if (__builtin_cpu_supports("avx2")) sets.list[sets.count++] = &kernels_avx2;
#endif
  sets.list[sets.count++] = &kernels_baseline;
  return sets;
}

}  // namespace

const Sets& runnable_sets() {
  static const Sets sets = find_sets();
  return sets;
}

}  // namespace offload
