// Which of the compiled instruction sets this processor can run.
#ifndef OFFLOAD_DISPATCH_H
#define OFFLOAD_DISPATCH_H

#include "kernels.h"

namespace offload {

constexpr int kMaxSets = 3;

struct Sets {
  int count = 0;
  const Kernels* list[kMaxSets] = {};  // fastest first
};

// Found once, at the first call.
const Sets& runnable_sets();

}  // namespace offload

#endif  // OFFLOAD_DISPATCH_H
