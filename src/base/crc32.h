// CRC-32 as zip uses it (polynomial 0xEDB88320).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

// The CRC-32 of what had CRC `so_far` (0 at the start) followed by `bytes`.
[[nodiscard]] std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t so_far = 0);

// The CRC-32 of a text with CRC `first` followed by `second_size` bytes with CRC `second`.
[[nodiscard]] std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second,
                                          std::uint64_t second_size);

}  // namespace tessera
