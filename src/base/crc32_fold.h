// CRC-32 of long rows of bytes, by multiplications without carries of 512 bits at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

// The size of a text that can replace a long one: a text of this many bytes with the same CRC-32,
// but for what the CRC begins with, which is folded in.
inline constexpr std::size_t kFoldedBytes = 256;

// Whether this processor has the instructions.
[[nodiscard]] bool can_fold_crc32() noexcept;

// `bytes`: at least kFoldedBytes. Takes as many whole blocks of kFoldedBytes as there are and
// returns their number of bytes. `crc`: of what came before them. The register of a CRC that begins
// with zeros and goes over `folded` is where the text's is. Only where can_fold_crc32().
std::size_t fold_crc32(std::span<const std::byte> bytes, std::uint32_t crc,
                       std::span<std::byte, kFoldedBytes> folded) noexcept;

}  // namespace tessera
