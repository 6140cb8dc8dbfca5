// CRC-32C in software, and with the instruction that x86 (SSE4.2) and ARMv8 have for it.
//
// Note [The one intrinsic]
// Everywhere else a plain loop is left to the compiler. No compiler makes the CRC instruction out of a loop, and it is
// ten times as fast as tables, so it is named here, in functions compiled for it and called where the processor has it.
// See docs/decisions/0009-crc-by-instruction.md.
#include "crc32c.h"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define OFFLOAD_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__) && (!defined(__clang__) || __clang_major__ >= 16)
#include <arm_acle.h>
#include <sys/auxv.h>
#define OFFLOAD_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace offload {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // with its bits reflected, as the registers are

// A register's four bytes move through four tables, whatever the distance.
struct Shift {
  std::uint32_t table[4][256];
  std::uint32_t operator()(std::uint32_t r) const {
    return table[0][r & 0xff] ^ table[1][r >> 8 & 0xff] ^ table[2][r >> 16 & 0xff] ^ table[3][r >> 24];
  }
};

constexpr std::size_t kSlices = 8;

// slice[k][b]: what byte b and k zero bytes after it make of an empty register.
struct Slices {
  std::uint32_t slice[kSlices][256];
  Slices() {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t r = byte;
      for (int bit = 0; bit < 8; ++bit) r = r >> 1 ^ (r & 1 ? kPolynomial : 0);
      slice[0][byte] = r;
    }
    for (std::size_t k = 1; k < kSlices; ++k) {
      for (int byte = 0; byte < 256; ++byte) slice[k][byte] = after_zero(slice[k - 1][byte]);
    }
  }
  std::uint32_t after_zero(std::uint32_t r) const { return slice[0][r & 0xff] ^ r >> 8; }

  // What `zeros` zero bytes make of any register.
  Shift shift(std::size_t zeros) const {
    Shift made;
    for (int at = 0; at < 4; ++at) {
      made.table[at][0] = 0;
      for (int bit = 0; bit < 8; ++bit) {
        std::uint32_t r = 1u << (8 * at + bit);
        for (std::size_t i = 0; i < zeros; ++i) r = after_zero(r);
        // A register is the exclusive or of its bits, and so is what becomes of it.
        for (int low = 0; low < 1 << bit; ++low) made.table[at][1 << bit | low] = r ^ made.table[at][low];
      }
    }
    return made;
  }
};

const Slices& slices() {
  static const Slices made;
  return made;
}

}  // namespace

std::uint32_t crc32c_software(const unsigned char* data, std::size_t size) {
  const Slices& tables = slices();
  const auto& slice = tables.slice;
  std::uint32_t r = ~0u;
  for (; size >= kSlices; data += kSlices, size -= kSlices) {
    r ^= data[0] | data[1] << 8 | data[2] << 16 | static_cast<std::uint32_t>(data[3]) << 24;
    r = slice[7][r & 0xff] ^ slice[6][r >> 8 & 0xff] ^ slice[5][r >> 16 & 0xff] ^ slice[4][r >> 24] ^
        slice[3][data[4]] ^ slice[2][data[5]] ^ slice[1][data[6]] ^ slice[0][data[7]];
  }
  for (; size > 0; ++data, --size) r = slice[0][(r ^ *data) & 0xff] ^ r >> 8;
  return ~r;
}

#if defined(OFFLOAD_CRC_TARGET)

namespace {

#if defined(__x86_64__)
using Register = std::uint64_t;  // as the instruction has it; the upper half stays 0
OFFLOAD_CRC_TARGET inline Register take_word(Register r, std::uint64_t word) {
  return _mm_crc32_u64(r, word);
}
OFFLOAD_CRC_TARGET inline Register take_byte(Register r, unsigned char byte) {
  return _mm_crc32_u8(static_cast<std::uint32_t>(r), byte);
}
bool has_instruction() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2");
}
#else
using Register = std::uint32_t;
OFFLOAD_CRC_TARGET inline Register take_word(Register r, std::uint64_t word) {
  return __crc32cd(r, word);
}
OFFLOAD_CRC_TARGET inline Register take_byte(Register r, unsigned char byte) {
  return __crc32cb(r, byte);
}
bool has_instruction() {
  constexpr unsigned long kCrc32 = 1 << 7;  // HWCAP_CRC32, which old headers lack
  return getauxval(AT_HWCAP) & kCrc32;
}
#endif

constexpr std::size_t kWord = 8;
constexpr std::size_t kLine = 64;  // of a cache

OFFLOAD_CRC_TARGET inline std::uint64_t load(const unsigned char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, kWord);
  return word;
}

// Three streams of kStream bytes side by side: an instruction takes one cycle to begin and three to end. Processors
// foresee one stream that is read from memory, but not three that begin anew every page: each line asks for the one at
// its place in the next block. An address beyond the data is no access.
template <std::size_t kStream>
OFFLOAD_CRC_TARGET inline Register three_streams(Register r, const unsigned char*& data, std::size_t& size) {
  static_assert(kStream % kLine == 0, "streams are made of whole lines");
  static const Shift shift = slices().shift(kStream);
  for (; size >= 3 * kStream; data += 3 * kStream, size -= 3 * kStream) {
    Register second = 0, third = 0;
    for (std::size_t line = 0; line < kStream; line += kLine) {
      for (std::size_t stream = 3; stream < 6; ++stream) __builtin_prefetch(data + stream * kStream + line);
      for (std::size_t i = line; i < line + kLine; i += kWord) {
        r = take_word(r, load(data + i));
        second = take_word(second, load(data + kStream + i));
        third = take_word(third, load(data + 2 * kStream + i));
      }
    }
    r = shift(static_cast<std::uint32_t>(r)) ^ static_cast<std::uint32_t>(second);
    r = shift(static_cast<std::uint32_t>(r)) ^ static_cast<std::uint32_t>(third);
  }
  return r;
}

OFFLOAD_CRC_TARGET std::uint32_t with_instruction(const unsigned char* data, std::size_t size) {
  Register r = ~std::uint32_t{0};
  r = three_streams<1344>(r, data, size);  // a page but for a line
  r = three_streams<192>(r, data, size);
  for (; size >= kWord; data += kWord, size -= kWord) r = take_word(r, load(data));
  for (; size > 0; ++data, --size) r = take_byte(r, *data);
  return ~static_cast<std::uint32_t>(r);
}

}  // namespace

Crc32c crc32c_hardware() {
  static const bool has = has_instruction();
  return has ? with_instruction : nullptr;
}

#else

Crc32c crc32c_hardware() {
  return nullptr;
}

#endif

}  // namespace offload
