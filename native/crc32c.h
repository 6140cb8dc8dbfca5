// CRC-32C (Castagnoli; RFC 3720, appendix B.4): the checksum of what lies on disk.
#ifndef OFFLOAD_CRC32C_H
#define OFFLOAD_CRC32C_H

#include <cstddef>
#include <cstdint>

namespace offload {

// The checksum of size bytes at data.
using Crc32c = std::uint32_t (*)(const unsigned char* data, std::size_t size);

std::uint32_t crc32c_software(const unsigned char* data, std::size_t size);

// The one that uses the processor's CRC instruction; nullptr where it has none.
Crc32c crc32c_hardware();

}  // namespace offload

#endif  // OFFLOAD_CRC32C_H
