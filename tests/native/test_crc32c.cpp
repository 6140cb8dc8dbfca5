// CRC-32C through the C interface. The values for any input are checked against the bytewise definition in
// tests/unit/test_crc.py; here, under sanitizers: RFC 3720's examples, no access outside a buffer, no race.
#include <cerrno>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "offload_native.h"

namespace {

std::vector<std::int32_t> ways() {
  std::vector<std::int32_t> found{OFFLOAD_CRC_SOFTWARE};
  if (offload_crc_hardware()) found.push_back(OFFLOAD_CRC_HARDWARE);
  return found;
}

std::vector<std::uint32_t> checksums(const std::vector<unsigned char>& data, std::uint64_t granule, std::int32_t how,
                                     std::int32_t threads = 1) {
  std::vector<std::uint32_t> out((data.size() + granule - 1) / granule);
  CHECK_EQUAL(offload_crc32c(data.data(), data.size(), granule, out.data(), how, threads), 0);
  return out;
}

// Allocated to the byte, so that the address sanitizer sees one byte too many.
std::vector<unsigned char> noise(std::size_t n) {
  std::vector<unsigned char> bytes(n);
  std::uint32_t state = static_cast<std::uint32_t>(n) + 1;
  for (unsigned char& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<unsigned char>(state >> 24);
  }
  return bytes;
}

void the_examples_of_the_standard() {
  std::vector<unsigned char> rising(32), falling(32);
  for (unsigned char i = 0; i < 32; ++i) rising[i] = falling[31 - i] = i;
  const std::string digits = "123456789";
  for (const std::int32_t how : ways()) {
    CHECK_EQUAL(checksums({digits.begin(), digits.end()}, 9, how)[0], 0xe3069283u);
    CHECK_EQUAL(checksums(std::vector<unsigned char>(32, 0x00), 32, how)[0], 0x8a9136aau);
    CHECK_EQUAL(checksums(std::vector<unsigned char>(32, 0xff), 32, how)[0], 0x62a8ab43u);
    CHECK_EQUAL(checksums(rising, 32, how)[0], 0x46dd794eu);
    CHECK_EQUAL(checksums(falling, 32, how)[0], 0x113fdb5cu);
  }
}

void every_way_gives_the_same() {
  for (std::size_t n = 0; n < 1100; ++n) {
    const auto data = noise(n);
    const auto expected = checksums(data, 5000, OFFLOAD_CRC_SOFTWARE);
    for (const std::int32_t how : ways()) CHECK(checksums(data, 5000, how) == expected);
  }
  const auto data = noise(1000003);
  for (const std::uint64_t granule : {7, 1000, 4096, 65536, 999999, 1000003, 5000000}) {
    const auto expected = checksums(data, granule, OFFLOAD_CRC_SOFTWARE);
    for (const std::int32_t how : ways()) {
      for (const std::int32_t threads : {1, 3}) CHECK(checksums(data, granule, how, threads) == expected);
    }
  }
}

void many_callers_at_once() {
  const auto data = noise(1000003);
  const auto expected = checksums(data, 4096, OFFLOAD_CRC_SOFTWARE);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 8; ++round) CHECK(checksums(data, 4096, ways().back(), 1 + round % 3) == expected);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void wrong_arguments_are_refused() {
  const unsigned char byte = 0;
  std::uint32_t out = 0;
  CHECK_EQUAL(offload_crc32c(&byte, 1, 0, &out, OFFLOAD_CRC_SOFTWARE, 1), -EINVAL);
  CHECK_EQUAL(offload_crc32c(&byte, 1, 1, &out, OFFLOAD_CRC_SOFTWARE, 0), -EINVAL);
  CHECK_EQUAL(offload_crc32c(&byte, 1, 1, &out, 9, 1), -EINVAL);
  CHECK_EQUAL(offload_crc32c(nullptr, 1, 1, &out, OFFLOAD_CRC_SOFTWARE, 1), -EINVAL);
  CHECK_EQUAL(offload_crc32c(&byte, 1, 1, nullptr, OFFLOAD_CRC_SOFTWARE, 1), -EINVAL);
  CHECK_EQUAL(offload_crc32c(nullptr, 0, 1, nullptr, OFFLOAD_CRC_SOFTWARE, 1), 0);
  if (!offload_crc_hardware()) CHECK_EQUAL(offload_crc32c(&byte, 1, 1, &out, OFFLOAD_CRC_HARDWARE, 1), -ENOTSUP);
}

}  // namespace

int main() {
  RUN(many_callers_at_once);  // first, so that they make the tables at the same time
  RUN(the_examples_of_the_standard);
  RUN(every_way_gives_the_same);
  RUN(wrong_arguments_are_refused);
  std::fprintf(stderr, "all well\n");
}
