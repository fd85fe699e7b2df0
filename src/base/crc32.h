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
// The term of the part with this CRC-32 and size behind which `behind` bytes of the text follow.
[[nodiscard]] std::uint32_t crc32_term(std::uint32_t part, std::uint64_t size,
                                       std::uint64_t behind);
// `terms`: of parts that have every byte of the text, of `size` bytes, once.
[[nodiscard]] std::uint32_t crc32_of_terms(std::uint32_t terms, std::uint64_t size);

// The terms of parts of one text that are added from front to back. Parts of one size that lie
// equally far apart, as rows do, need one multiplication each, others some tens.
class Crc32Terms {
 public:
  // `end`: where the part, which lies behind all others, ends in the text.
  void add(std::uint32_t part, std::uint64_t size, std::uint64_t end);
  // The CRC-32 of a text of `size` bytes.
  [[nodiscard]] std::uint32_t of_text(std::uint64_t size) const;

 private:
  std::uint32_t terms_ = 0;  // of a text that ends where the last part does
  std::uint64_t end_ = 0;
  std::uint64_t size_ = 0;   // of the last part
  std::uint32_t zeros_ = 0;  // the CRC-32 of so many zeros
  std::uint64_t step_ = 0;   // from an end to the next
  std::uint32_t operator_ = 0;
};

}  // namespace tessera
