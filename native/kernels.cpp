// The arithmetic, as plain loops. CMake compiles this one file once per instruction set and the compiler makes the
// vectors.
//
// Note [The same bits everywhere]
// Each fp32 operation below is rounded on its own: -ffp-contract=off keeps a*b+c from becoming one fused operation
// where the processor has one, and division and square root are the exact IEEE ones. -fno-math-errno and
// -fno-trapping-math change no value; they only let sqrt and the selects become vector instructions. Nothing here
// depends on the width of a vector: elements do not meet each other, and sums have 32 fixed lanes.
//
// Note [No includes]
// Only <cstddef> and <cstdint>, and everything has internal linkage: an inline function from another header would
// be emitted here with wide instructions, and the linker may pick that copy for a processor that cannot run it.
#include "kernels.h"

#if !defined(OFFLOAD_KERNELS) || !defined(OFFLOAD_KERNELS_NAME)
#error "compile with -DOFFLOAD_KERNELS=<symbol> -DOFFLOAD_KERNELS_NAME=\"<name>\""
#endif

#define OFFLOAD_RESTRICT __restrict__

namespace {

using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

inline uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

// How a type is stored and what it means. Conversions are free of branches, round to nearest even and keep
// NaN, infinities, signed zeros and subnormal numbers.
struct F32 {
  using Stored = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
  static float store_moment(float x, uint32_t) { return x; }
};

struct BF16 {  // the upper half of an fp32
  using Stored = uint16_t;
  static float load(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
  static uint16_t store(float x) {
    const uint32_t u = bits_of(x);
    // Half of the last kept place, less one when the kept part is even, carries into it. A NaN must not be carried
    // into an infinity: it keeps its upper half and becomes quiet.
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t quiet = (u >> 16) | 0x40u;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
  // Stochastic rounding: up with the probability that the dropped half stands for, by the low half of `random`.
  // What is finite stays finite: above the largest finite value the rest is cut off. So it is of an infinity or a NaN,
  // which stays one, since arithmetic gives quiet ones, whose mark is in the upper half.
  static uint16_t store_moment(float x, uint32_t random) {
    const uint32_t u = bits_of(x);
    const uint32_t up = (u & 0x7fffffffu) < 0x7f7f0000u ? random & 0xffffu : 0u;
    return static_cast<uint16_t>((u + up) >> 16);
  }
};

struct F16 {  // 1 sign, 5 exponent (bias 15), 10 fraction bits
  using Stored = uint16_t;
  static float load(uint16_t h) {
    const uint32_t sign = (static_cast<uint32_t>(h) & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(h) & 0x7fffu;
    // Normal: shift into place and rebias by 127 - 15. Infinity, NaN: the exponent becomes 255 instead of 143.
    // Subnormal: put the fraction behind a 2^-14 (exponent field 113) and take that one away again; exact.
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = normal + (112u << 23);
    const uint32_t subnormal = bits_of(float_of((magnitude << 13) + (113u << 23)) - float_of(113u << 23));
    uint32_t u = magnitude < 0x0400u ? subnormal : normal;
    u = magnitude >= 0x7c00u ? special : u;
    return float_of(u | sign);
  }
  static uint16_t store(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    // Normal: rebias, then round as in BF16::store; a carry out of the largest finite value gives infinity.
    const uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal (below 2^-14): adding 0.5, whose last fraction bit is worth 2^-24, makes the processor round there.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t h = magnitude < (113u << 23) ? subnormal : normal;
    h = magnitude >= (143u << 23) ? 0x7c00u : h;                                  // 65536 and above
    h = magnitude > 0x7f800000u ? (0x7e00u | ((magnitude >> 13) & 0x03ffu)) : h;  // NaN
    return static_cast<uint16_t>(h | sign);
  }
};

// Note [Random bits by counting]
// Which way a moment is rounded is decided by a hash of the step, the element's number in its model and nothing else,
// so it does not depend on where the element lives, nor on who computes it when. The hash is a finaliser of the
// murmur3 kind: shifts, exclusive-ors and two odd multipliers (a pair known for its small bias from the search of
// C. Wellons' hash-prospector), so that each bit in changes about half of the bits out. A second key enters between the
// multiplications, so that two steps do not see one sequence from two starts. Of its 32 bits the low half rounds
// exp_avg, the high half exp_avg_sq.
constexpr uint32_t kMultiply1 = 0x21f0aaadu, kMultiply2 = 0x735a2d97u;
constexpr uint32_t kSeed1 = 0x5eed0001u, kSeed2 = 0x5eed0002u;

inline uint32_t mix(uint32_t x, uint32_t key) {
  x ^= x >> 16;
  x *= kMultiply1;
  x ^= x >> 15;
  x += key;
  x *= kMultiply2;
  x ^= x >> 15;
  return x;
}

struct Keys {
  uint32_t first, second;
};

// For elements whose numbers have these upper 32 bits.
inline Keys keys_of(uint32_t step, uint32_t upper) {
  return {mix(mix(step, kSeed1) ^ upper, 0), mix(mix(step, kSeed2) ^ upper, 0)};
}

struct Nothing {  // no copy of the new weights is wanted
  using Stored = uint16_t;
};

template <class Out>
inline void put(typename Out::Stored* out, size_t i, float x) {
  out[i] = Out::store(x);
}
template <>
inline void put<Nothing>(uint16_t*, size_t, float) {}

template <class Param, class Grad, class Out, class Moment, bool decoupled>
void adam_loop(const offload_adam_args& a, size_t begin, size_t end) {
  typename Param::Stored* OFFLOAD_RESTRICT param = static_cast<typename Param::Stored*>(a.param);
  const typename Grad::Stored* OFFLOAD_RESTRICT grad = static_cast<const typename Grad::Stored*>(a.grad);
  typename Moment::Stored* OFFLOAD_RESTRICT exp_avg = static_cast<typename Moment::Stored*>(a.exp_avg);
  typename Moment::Stored* OFFLOAD_RESTRICT exp_avg_sq = static_cast<typename Moment::Stored*>(a.exp_avg_sq);
  typename Out::Stored* OFFLOAD_RESTRICT out = static_cast<typename Out::Stored*>(a.out);
  const float grad_scale = a.grad_scale, decay = a.decay;
  const float beta1 = a.beta1, one_minus_beta1 = a.one_minus_beta1;
  const float beta2 = a.beta2, one_minus_beta2 = a.one_minus_beta2;
  const float inv_sqrt_bias2 = a.inv_sqrt_bias2, eps = a.eps, step_size = a.step_size;
  uint32_t number = static_cast<uint32_t>(a.first + begin);
  const Keys keys = keys_of(a.step, static_cast<uint32_t>((a.first + begin) >> 32));

  for (size_t i = begin; i < end; ++i, ++number) {
    float p = Param::load(param[i]);
    float g = Grad::load(grad[i]) * grad_scale;
    if (decoupled) {
      p = p * decay;
    } else {
      g = g + p * decay;
    }
    const float m = Moment::load(exp_avg[i]) * beta1 + g * one_minus_beta1;
    const float v = Moment::load(exp_avg_sq[i]) * beta2 + (g * g) * one_minus_beta2;
    const float d = __builtin_sqrtf(v) * inv_sqrt_bias2 + eps;
    p = p - step_size * (m / d);
    const uint32_t random = mix(number ^ keys.first, keys.second);
    exp_avg[i] = Moment::store_moment(m, random);
    exp_avg_sq[i] = Moment::store_moment(v, random >> 16);
    param[i] = Param::store(p);
    put<Out>(out, i, p);
  }
}

template <class Param, class Grad, class Out, class Moment>
bool adam_decay(const offload_adam_args& a, size_t begin, size_t end) {
  if (a.decoupled) {
    adam_loop<Param, Grad, Out, Moment, true>(a, begin, end);
  } else {
    adam_loop<Param, Grad, Out, Moment, false>(a, begin, end);
  }
  return true;
}

template <class Param, class Out, class Moment>
bool adam_grad(const offload_adam_args& a, size_t begin, size_t end) {
  switch (a.grad_dtype) {
    case OFFLOAD_F32:
      return adam_decay<Param, F32, Out, Moment>(a, begin, end);
    case OFFLOAD_BF16:
      return adam_decay<Param, BF16, Out, Moment>(a, begin, end);
    case OFFLOAD_F16:
      return adam_decay<Param, F16, Out, Moment>(a, begin, end);
    default:
      return false;
  }
}

template <class Moment>
bool adam_param(const offload_adam_args& a, size_t begin, size_t end) {
  if (a.param_dtype == OFFLOAD_F32) {
    switch (a.out_dtype) {
      case OFFLOAD_NONE:
        return adam_grad<F32, Nothing, Moment>(a, begin, end);
      case OFFLOAD_F32:
        return adam_grad<F32, F32, Moment>(a, begin, end);
      case OFFLOAD_BF16:
        return adam_grad<F32, BF16, Moment>(a, begin, end);
      case OFFLOAD_F16:
        return adam_grad<F32, F16, Moment>(a, begin, end);
      default:
        return false;
    }
  }
  if (a.out_dtype != OFFLOAD_NONE) return false;
  if (a.param_dtype == OFFLOAD_BF16) return adam_grad<BF16, Nothing, Moment>(a, begin, end);
  if (a.param_dtype == OFFLOAD_F16) return adam_grad<F16, Nothing, Moment>(a, begin, end);
  return false;
}

bool adam(const offload_adam_args& a, size_t begin, size_t end) {
  // The keys of the random bits hold for one value of the upper half of the elements' numbers.
  const uint64_t room = (uint64_t{1} << 32) - ((a.first + begin) & 0xffffffffu);
  if (end - begin > room) {
    const size_t middle = begin + static_cast<size_t>(room);
    return adam(a, begin, middle) && adam(a, middle, end);
  }
  if (a.moment_dtype == OFFLOAD_F32) return adam_param<F32>(a, begin, end);
  if (a.moment_dtype == OFFLOAD_BF16) return adam_param<BF16>(a, begin, end);
  return false;
}

// Element i of a block goes to lane i % 32; each lane is added up in order, then the lanes are folded in halves.
// Missing elements of the last block count as zeros, which change no sum.
constexpr size_t kLanes = 32;

template <class T>
inline double sum_block(const typename T::Stored* OFFLOAD_RESTRICT x, size_t size) {
  const size_t rows = size / kLanes;
  double lane[kLanes] = {};
  for (size_t row = 0; row < rows; ++row) {
    const typename T::Stored* OFFLOAD_RESTRICT at = x + row * kLanes;
    for (size_t j = 0; j < kLanes; ++j) {
      const double value = static_cast<double>(T::load(at[j]));
      lane[j] += value * value;
    }
  }
  for (size_t j = 0; j < size % kLanes; ++j) {
    const double value = static_cast<double>(T::load(x[rows * kLanes + j]));
    lane[j] += value * value;
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

inline size_t block_size(size_t start, size_t n) {
  return n - start < offload::kBlock ? n - start : offload::kBlock;
}

template <class T>
void sum_squares_blocks(const typename T::Stored* x, size_t n, double* blocks) {
  for (size_t start = 0, block = 0; start < n; start += offload::kBlock, ++block) {
    blocks[block] = sum_block<T>(x + start, block_size(start, n));
  }
}

bool sum_squares(const void* x, std::int32_t dtype, size_t n, double* blocks) {
  switch (dtype) {
    case OFFLOAD_F32:
      sum_squares_blocks<F32>(static_cast<const float*>(x), n, blocks);
      return true;
    case OFFLOAD_BF16:
      sum_squares_blocks<BF16>(static_cast<const uint16_t*>(x), n, blocks);
      return true;
    case OFFLOAD_F16:
      sum_squares_blocks<F16>(static_cast<const uint16_t*>(x), n, blocks);
      return true;
    default:
      return false;
  }
}

// A value of one type as another: rounded to nearest even, or the same bits.
template <class To, class From>
struct Converted {
  static typename To::Stored of(typename From::Stored x) { return To::store(From::load(x)); }
};
template <class Same>
struct Converted<Same, Same> {
  static typename Same::Stored of(typename Same::Stored x) { return x; }
};

// Copies or adds block by block, and sums each one's squares while it is in the first cache.
template <class To, class From>
void accumulate_blocks(const offload::AccumulateArgs& a, size_t begin, size_t end) {
  for (size_t start = begin; start < end; start += offload::kBlock) {
    const size_t size = block_size(start, end);
    typename To::Stored* OFFLOAD_RESTRICT to = static_cast<typename To::Stored*>(a.target) + start;
    const typename From::Stored* OFFLOAD_RESTRICT from = static_cast<const typename From::Stored*>(a.source) + start;
    if (a.add) {
      for (size_t i = 0; i < size; ++i) {
        to[i] = To::store(To::load(to[i]) + To::load(Converted<To, From>::of(from[i])));
      }
    } else {
      for (size_t i = 0; i < size; ++i) to[i] = Converted<To, From>::of(from[i]);
    }
    a.blocks[start / offload::kBlock] = sum_block<To>(to, size);
  }
}

template <class To>
bool accumulate_from(const offload::AccumulateArgs& a, size_t begin, size_t end) {
  switch (a.source_dtype) {
    case OFFLOAD_F32:
      accumulate_blocks<To, F32>(a, begin, end);
      return true;
    case OFFLOAD_BF16:
      accumulate_blocks<To, BF16>(a, begin, end);
      return true;
    case OFFLOAD_F16:
      accumulate_blocks<To, F16>(a, begin, end);
      return true;
    default:
      return false;
  }
}

bool accumulate(const offload::AccumulateArgs& a, size_t begin, size_t end) {
  switch (a.target_dtype) {
    case OFFLOAD_F32:
      return accumulate_from<F32>(a, begin, end);
    case OFFLOAD_BF16:
      return accumulate_from<BF16>(a, begin, end);
    case OFFLOAD_F16:
      return accumulate_from<F16>(a, begin, end);
    default:
      return false;
  }
}

void traffic(const offload::TrafficArgs& a, size_t begin, size_t end) {
  float* OFFLOAD_RESTRICT param = a.param;
  const uint16_t* OFFLOAD_RESTRICT grad = a.grad;
  float* OFFLOAD_RESTRICT exp_avg = a.exp_avg;
  float* OFFLOAD_RESTRICT exp_avg_sq = a.exp_avg_sq;
  uint16_t* OFFLOAD_RESTRICT out = a.out;
  for (size_t i = begin; i < end; ++i) {
    const float g = BF16::load(grad[i]);
    param[i] += g;
    exp_avg[i] += g;
    exp_avg_sq[i] += g;
    out[i] = grad[i];
  }
}

}  // namespace

namespace offload {
extern const Kernels OFFLOAD_KERNELS = {OFFLOAD_KERNELS_NAME, adam, sum_squares, accumulate, traffic};
}  // namespace offload
