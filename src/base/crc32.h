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

// The CRC-32 of a text that is known in parts, in any order, perhaps to several processes: the
// terms of all parts, combined by exclusive or, make it.
//
// Of the part with this CRC-32 and size behind which `behind` bytes of the text follow.
[[nodiscard]] std::uint32_t crc32_term(std::uint32_t part, std::uint64_t size,
                                       std::uint64_t behind);
// `terms`: of parts that have every byte of the text, of `size` bytes, once.
[[nodiscard]] std::uint32_t crc32_of_terms(std::uint32_t terms, std::uint64_t size);

}  // namespace tessera
