// Kernels and thread pool through the C interface. The values are checked against NumPy in tests/unit/test_native.py;
// here, under sanitizers: no access outside a buffer, no race, the same bits from every instruction set and thread
// count.
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "offload_native.h"

namespace {

constexpr std::size_t kLong = 200003;  // several portions and a ragged end

std::uint32_t random_bits() {
  static thread_local std::uint64_t state = 88172645463325252ULL;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<std::uint32_t>(state >> 16);
}

float random_float() {
  return static_cast<float>(static_cast<std::int32_t>(random_bits())) * 1e-9f;
}

// Every buffer is allocated to the byte, so that the address sanitizer sees one element too many.
struct Update {
  std::size_t item(std::int32_t dtype) const { return dtype == OFFLOAD_NONE ? 0 : dtype == OFFLOAD_F32 ? 4 : 2; }

  Update(std::size_t n, std::int32_t param_dtype, std::int32_t grad_dtype, std::int32_t out_dtype, bool decoupled,
         std::int32_t moment_dtype = OFFLOAD_F32)
      : param(n * item(param_dtype)),
        grad(n * item(grad_dtype)),
        m(n * item(moment_dtype)),
        v(n * item(moment_dtype)),
        out(n * item(out_dtype)) {
    fill(m, moment_dtype);
    fill(v, moment_dtype);
    for (std::size_t i = item(moment_dtype) - 1; i < v.size(); i += item(moment_dtype)) v[i] &= 0x7f;  // no sign
    fill(param, param_dtype);
    fill(grad, grad_dtype);
    args = {};
    args.param = param.data();
    args.grad = grad.data();
    args.exp_avg = m.data();
    args.exp_avg_sq = v.data();
    args.out = out_dtype == OFFLOAD_NONE ? nullptr : out.data();
    args.n = n;
    args.first = (std::uint64_t{1} << 32) - 10;  // the upper half of the elements' numbers changes on the way
    args.step = 3;
    args.moment_dtype = moment_dtype;
    args.param_dtype = param_dtype;
    args.grad_dtype = grad_dtype;
    args.out_dtype = out_dtype;
    args.decoupled = decoupled;
    args.grad_scale = 0.5f;
    args.decay = decoupled ? 0.999f : 0.1f;
    args.beta1 = 0.9f;
    args.one_minus_beta1 = 0.1f;
    args.beta2 = 0.999f;
    args.one_minus_beta2 = 0.001f;
    args.inv_sqrt_bias2 = 1.5f;
    args.eps = 1e-8f;
    args.step_size = 1e-3f;
  }

  static void fill(std::vector<char>& bytes, std::int32_t dtype) {
    if (dtype == OFFLOAD_F32) {
      for (std::size_t i = 0; i < bytes.size(); i += 4) {
        const float x = random_float();
        std::memcpy(&bytes[i], &x, 4);
      }
    } else {
      for (std::size_t i = 0; i < bytes.size(); i += 2) {
        const auto x = static_cast<std::uint16_t>(random_bits() & 0xbbffu);  // finite in both 16-bit types
        std::memcpy(&bytes[i], &x, 2);
      }
    }
  }

  std::string run(std::int32_t isa, std::int32_t threads) {
    const auto keep_param = param;
    const auto keep_m = m, keep_v = v;
    CHECK_EQUAL(offload_adam(&args, isa, threads), 0);
    std::string all(param.begin(), param.end());
    all.append(m.begin(), m.end());
    all.append(v.begin(), v.end());
    all.append(out.begin(), out.end());
    std::memcpy(param.data(), keep_param.data(), param.size());
    m = keep_m;
    v = keep_v;
    args.exp_avg = m.data();
    args.exp_avg_sq = v.data();
    return all;
  }

  std::vector<char> param, grad, m, v, out;
  offload_adam_args args;
};

void adam_gives_the_same_bits() {
  const std::int32_t dtypes[] = {OFFLOAD_F32, OFFLOAD_BF16, OFFLOAD_F16};
  const std::int32_t outs[] = {OFFLOAD_NONE, OFFLOAD_F32, OFFLOAD_BF16, OFFLOAD_F16};
  for (const std::int32_t param : dtypes) {
    for (const std::int32_t grad : dtypes) {
      for (const std::int32_t out : outs) {
        if (param != OFFLOAD_F32 && out != OFFLOAD_NONE) continue;
        for (std::size_t n : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 1000}) {
          for (const bool decoupled : {true, false}) {
            for (const std::int32_t moments : {OFFLOAD_F32, OFFLOAD_BF16}) {
              Update update(n, param, grad, out, decoupled, moments);
              const std::string expected = update.run(0, 1);
              for (std::int32_t isa = 1; isa < offload_isa_count(); ++isa) CHECK(update.run(isa, 1) == expected);
            }
          }
        }
      }
    }
  }
  for (const std::int32_t moments : {OFFLOAD_F32, OFFLOAD_BF16}) {
    Update update(kLong, OFFLOAD_F32, OFFLOAD_BF16, OFFLOAD_BF16, true, moments);
    const std::string expected = update.run(0, 1);
    for (std::int32_t isa = 0; isa < offload_isa_count(); ++isa) {
      for (const std::int32_t threads : {1, 2, 3, 9}) CHECK(update.run(isa, threads) == expected);
    }
  }
}

void sum_squares_gives_the_same_bits() {
  for (const std::size_t n : {std::size_t{1}, std::size_t{31}, std::size_t{4097}, kLong}) {
    std::vector<float> x(n);
    double plain = 0;
    for (auto& value : x) {
      value = random_float();
      plain += static_cast<double>(value) * static_cast<double>(value);
    }
    double expected = 0;
    CHECK_EQUAL(offload_sum_squares(x.data(), OFFLOAD_F32, n, 0.0, 0, 1, &expected), 0);
    CHECK(std::fabs(expected - plain) <= 1e-12 * plain);
    for (std::int32_t isa = 0; isa < offload_isa_count(); ++isa) {
      for (const std::int32_t threads : {1, 2, 3}) {
        double found = 0;
        CHECK_EQUAL(offload_sum_squares(x.data(), OFFLOAD_F32, n, 0.0, isa, threads, &found), 0);
        CHECK(std::memcmp(&found, &expected, sizeof found) == 0);
      }
    }
    x[n - 1] = std::numeric_limits<float>::quiet_NaN();
    double found = 0;
    CHECK_EQUAL(offload_sum_squares(x.data(), OFFLOAD_F32, n, 0.0, 0, 2, &found), 0);
    CHECK(!std::isfinite(found));
  }
}

bool same(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

void accumulate_gives_the_same_bits() {
  const std::size_t n = kLong;
  for (const std::int32_t to : {OFFLOAD_F32, OFFLOAD_BF16, OFFLOAD_F16}) {
    for (const std::int32_t from : {OFFLOAD_F32, OFFLOAD_BF16, OFFLOAD_F16}) {
      const std::size_t size = to == OFFLOAD_F32 ? 4 : 2;
      std::vector<float> values(2 * n);
      for (auto& value : values) {
        value = random_float();
        if (from == OFFLOAD_F32) continue;
        std::uint32_t pair = 0;  // two numbers of 16 bits, made finite: which NaN a sum is depends on the compiler
        std::memcpy(&pair, &value, sizeof pair);
        pair &= 0xbfffbfffu;
        std::memcpy(&value, &pair, sizeof pair);
      }
      std::vector<char> expected(n * size), found(n * size);
      double sum = 0, expected_sum = 0, again = 0;
      for (const std::int32_t add : {0, 1}) {
        const float* source = values.data() + static_cast<std::size_t>(add) * n;
        CHECK_EQUAL(offload_accumulate(expected.data(), to, source, from, n, add, 0.0, 0, 1, &expected_sum), 0);
        CHECK_EQUAL(offload_sum_squares(expected.data(), to, n, 0.0, 0, 1, &again), 0);
        CHECK(same(again, expected_sum));
      }
      for (std::int32_t isa = 0; isa < offload_isa_count(); ++isa) {
        for (const std::int32_t threads : {1, 3}) {
          for (const std::int32_t add : {0, 1}) {
            const float* source = values.data() + static_cast<std::size_t>(add) * n;
            CHECK_EQUAL(offload_accumulate(found.data(), to, source, from, n, add, 0.0, isa, threads, &sum), 0);
          }
          CHECK(found == expected);
          CHECK(same(sum, expected_sum));
        }
      }
    }
  }
}

void many_callers_share_the_pool() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([] {
      Update update(kLong, OFFLOAD_F32, OFFLOAD_F32, OFFLOAD_F16, false);
      const std::string expected = update.run(0, 1);
      for (int round = 0; round < 20; ++round) CHECK(update.run(0, 1 + round % 4) == expected);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void a_forked_child_has_its_own_pool() {
#if !defined(OFFLOAD_TSAN)
  Update update(kLong, OFFLOAD_F32, OFFLOAD_F32, OFFLOAD_NONE, true);
  const std::string expected = update.run(0, 3);
  for (int round = 0; round < 10; ++round) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) _exit(update.run(0, 3) == expected ? 0 : 1);
    int status = 0;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
#endif
}

void wrong_arguments_are_refused() {
  Update update(8, OFFLOAD_F32, OFFLOAD_F32, OFFLOAD_NONE, true);
  offload_adam_args args = update.args;
  CHECK_EQUAL(offload_adam(nullptr, 0, 1), -EINVAL);
  CHECK_EQUAL(offload_adam(&args, -1, 1), -EINVAL);
  CHECK_EQUAL(offload_adam(&args, offload_isa_count(), 1), -EINVAL);
  CHECK_EQUAL(offload_adam(&args, 0, 0), -EINVAL);
  args.grad_dtype = 9;
  CHECK_EQUAL(offload_adam(&args, 0, 1), -EINVAL);
  args = update.args;
  args.out_dtype = OFFLOAD_BF16;  // but no out
  CHECK_EQUAL(offload_adam(&args, 0, 1), -EINVAL);
  args = update.args;
  args.moment_dtype = OFFLOAD_F16;
  CHECK_EQUAL(offload_adam(&args, 0, 1), -EINVAL);
  args = update.args;
  args.exp_avg = nullptr;
  CHECK_EQUAL(offload_adam(&args, 0, 1), -EINVAL);
  double sum = 0;
  CHECK_EQUAL(offload_sum_squares(nullptr, OFFLOAD_F32, 4, 0.0, 0, 1, &sum), -EINVAL);
  CHECK_EQUAL(offload_sum_squares(nullptr, OFFLOAD_F32, 0, 0.0, 0, 1, &sum), 0);
  CHECK_EQUAL(offload_sum_squares(update.param.data(), OFFLOAD_NONE, 4, 0.0, 0, 1, &sum), -EINVAL);
  float* x = static_cast<float*>(update.args.param);
  CHECK_EQUAL(offload_accumulate(nullptr, OFFLOAD_F32, x, OFFLOAD_F32, 4, 0, 0.0, 0, 1, &sum), -EINVAL);
  CHECK_EQUAL(offload_accumulate(x, OFFLOAD_F32, nullptr, OFFLOAD_F32, 4, 0, 0.0, 0, 1, &sum), -EINVAL);
  CHECK_EQUAL(offload_accumulate(x, OFFLOAD_F32, x + 4, OFFLOAD_NONE, 4, 0, 0.0, 0, 1, &sum), -EINVAL);
  CHECK_EQUAL(offload_accumulate(nullptr, OFFLOAD_F32, nullptr, OFFLOAD_F32, 0, 0, 1.5, 0, 1, &sum), 0);
  CHECK(sum == 1.5);
  CHECK(offload_isa_name(-1) == nullptr && offload_isa_name(99) == nullptr && offload_isa_name(0) != nullptr);
  CHECK(std::string(offload_error_text(-EINVAL)).find("nvalid") != std::string::npos);
  CHECK_EQUAL(offload_abi(), OFFLOAD_ABI);
}

}  // namespace

int main() {
  RUN(adam_gives_the_same_bits);
  RUN(sum_squares_gives_the_same_bits);
  RUN(accumulate_gives_the_same_bits);
  RUN(many_callers_share_the_pool);
  RUN(a_forked_child_has_its_own_pool);
  RUN(wrong_arguments_are_refused);
  std::fprintf(stderr, "all well\n");
}
