// The arithmetic half of offload_native.h: checks, and the way from a call to a kernel on a pool of threads.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>

#include "crc32c.h"
#include "dispatch.h"
#include "kernels.h"
#include "offload_native.h"
#include "pool.h"

namespace {

using offload::Kernels;

const Kernels* kernels_at(int32_t isa) {
  const offload::Sets& sets = offload::runnable_sets();
  return isa >= 0 && isa < sets.count ? sets.list[isa] : nullptr;
}

std::size_t item_size(int32_t dtype) {
  return dtype == OFFLOAD_F32 ? 4 : 2;
}

bool is_dtype(int32_t dtype) {
  return dtype == OFFLOAD_F32 || dtype == OFFLOAD_BF16 || dtype == OFFLOAD_F16;
}

static_assert(offload::kPortion % offload::kBlock == 0, "a portion must begin where a block begins");

// Has task make the sum of each block of n elements (into the `blocks` of its context), and adds them up in order.
template <class Context>
int32_t sum_of_blocks(uint64_t n, double start, int32_t threads, Context& context, offload::RangeTask task,
                      double* result) {
  const std::size_t count = (n + offload::kBlock - 1) / offload::kBlock;
  try {
    const std::unique_ptr<double[]> blocks(new double[count]);
    context.blocks = blocks.get();
    offload::parallel_for(n, threads, task, &context);
    double total = start;
    for (std::size_t i = 0; i < count; ++i) total += blocks[i];
    *result = total;
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}

}  // namespace

extern "C" {

int32_t offload_abi(void) {
  return OFFLOAD_ABI;
}

const char* offload_error_text(int32_t code) {
  static thread_local char text[128];
  // strerror_r has two signatures; this overload set takes either result.
  struct Pick {
    static const char* of(const char* found, const char*) { return found; }
    static const char* of(int, const char* buffer) { return buffer; }
  };
  return Pick::of(strerror_r(code < 0 ? -code : code, text, sizeof text), text);
}

int32_t offload_isa_count(void) {
  return offload::runnable_sets().count;
}

const char* offload_isa_name(int32_t index) {
  const Kernels* kernels = kernels_at(index);
  return kernels == nullptr ? nullptr : kernels->name;
}

int32_t offload_adam(const offload_adam_args* args, int32_t isa, int32_t threads) {
  const Kernels* kernels = kernels_at(isa);
  if (kernels == nullptr || args == nullptr || threads < 1) return -EINVAL;
  const bool out_wanted = args->out_dtype != OFFLOAD_NONE;
  if (out_wanted != (args->out != nullptr)) return -EINVAL;
  if (!kernels->adam(*args, 0, 0)) return -EINVAL;  // an empty range: are there kernels for these dtypes?
  if (args->n == 0) return 0;
  if (!args->param || !args->grad || !args->exp_avg || !args->exp_avg_sq) return -EINVAL;
  struct Context {
    const Kernels* kernels;
    const offload_adam_args* args;
  } context{kernels, args};
  try {
    offload::parallel_for(
        args->n, threads,
        [](void* raw, std::size_t begin, std::size_t end) {
          const Context& c = *static_cast<const Context*>(raw);
          c.kernels->adam(*c.args, begin, end);
        },
        &context);
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}

int32_t offload_sum_squares(const void* x, int32_t dtype, uint64_t n, double start, int32_t isa, int32_t threads,
                            double* result) {
  const Kernels* kernels = kernels_at(isa);
  if (kernels == nullptr || result == nullptr || threads < 1 || !is_dtype(dtype)) return -EINVAL;
  *result = start;
  if (n == 0) return 0;
  if (x == nullptr) return -EINVAL;
  struct Context {
    const Kernels* kernels;
    const char* x;
    int32_t dtype;
    double* blocks;
  } context{kernels, static_cast<const char*>(x), dtype, nullptr};
  return sum_of_blocks(
      n, start, threads, context,
      [](void* raw, std::size_t begin, std::size_t end) {
        const Context& c = *static_cast<const Context*>(raw);
        c.kernels->sum_squares(c.x + begin * item_size(c.dtype), c.dtype, end - begin,
                               c.blocks + begin / offload::kBlock);
      },
      result);
}

int32_t offload_accumulate(void* target, int32_t target_dtype, const void* source, int32_t source_dtype, uint64_t n,
                           int32_t add, double start, int32_t isa, int32_t threads, double* result) {
  const Kernels* kernels = kernels_at(isa);
  if (kernels == nullptr || result == nullptr || threads < 1) return -EINVAL;
  if (!is_dtype(target_dtype) || !is_dtype(source_dtype)) return -EINVAL;
  *result = start;
  if (n == 0) return 0;
  if (!target || !source) return -EINVAL;
  struct Context : offload::AccumulateArgs {
    const Kernels* kernels;
  } context{{target, source, target_dtype, source_dtype, add != 0, nullptr}, kernels};
  return sum_of_blocks(
      n, start, threads, context,
      [](void* raw, std::size_t begin, std::size_t end) {
        const Context& c = *static_cast<const Context*>(raw);
        c.kernels->accumulate(c, begin, end);
      },
      result);
}

int32_t offload_traffic(float* param, const uint16_t* grad, float* exp_avg, float* exp_avg_sq, uint16_t* out,
                        uint64_t n, int32_t isa, int32_t threads) {
  const Kernels* kernels = kernels_at(isa);
  if (kernels == nullptr || threads < 1) return -EINVAL;
  if (n == 0) return 0;
  if (!param || !grad || !exp_avg || !exp_avg_sq || !out) return -EINVAL;
  struct Context {
    const Kernels* kernels;
    offload::TrafficArgs args;
  } context{kernels, {param, grad, exp_avg, exp_avg_sq, out}};
  try {
    offload::parallel_for(
        n, threads,
        [](void* raw, std::size_t begin, std::size_t end) {
          const Context& c = *static_cast<const Context*>(raw);
          c.kernels->traffic(c.args, begin, end);
        },
        &context);
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}

int32_t offload_crc_hardware(void) {
  return offload::crc32c_hardware() != nullptr ? 1 : 0;
}

int32_t offload_crc32c(const void* data, uint64_t nbytes, uint64_t granule, uint32_t* out, int32_t how,
                       int32_t threads) {
  if (granule == 0 || threads < 1 || (how != OFFLOAD_CRC_SOFTWARE && how != OFFLOAD_CRC_HARDWARE)) return -EINVAL;
  struct Context {
    const unsigned char* data;
    std::size_t nbytes, granule;
    uint32_t* out;
    offload::Crc32c checksum;
  } context{static_cast<const unsigned char*>(data), nbytes, granule, out,
            how == OFFLOAD_CRC_HARDWARE ? offload::crc32c_hardware() : offload::crc32c_software};
  if (context.checksum == nullptr) return -ENOTSUP;
  if (nbytes == 0) return 0;
  if (!data || !out) return -EINVAL;
  constexpr std::size_t kPortionBytes = 256 << 10;
  try {
    offload::parallel_for((nbytes - 1) / granule + 1, threads,
                          [](void* raw, std::size_t begin, std::size_t end) {
                            const Context& c = *static_cast<const Context*>(raw);
                            for (std::size_t i = begin; i < end; ++i) {
                              const std::size_t at = i * c.granule;
                              c.out[i] = c.checksum(c.data + at, std::min(c.granule, c.nbytes - at));
                            }
                          },
                          &context, std::max<std::size_t>(1, kPortionBytes / granule));
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
  return 0;
}

}  // extern "C"
