#include "base/crc32.h"

#include <libdeflate.h>
#include <zlib.h>

#include <array>

#include "base/crc32_fold.h"

namespace tessera {
namespace {

std::uint32_t crc32_of_zeros(std::uint64_t size) {
  constexpr std::uint32_t kAll = 0xFFFFFFFF;  // what the register begins with, and its end's mask
  return crc32_combine(kAll, 0, size) ^ kAll;
}

}  // namespace

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t so_far) {
  constexpr std::size_t kLong = 4 * kFoldedBytes;
  if (bytes.size() >= kLong && can_fold_crc32()) {
    std::array<std::byte, kFoldedBytes> folded{};
    bytes = bytes.subspan(fold_crc32(bytes, so_far, folded));
    constexpr std::uint32_t kZeroRegister = 0xFFFFFFFF;
    so_far = libdeflate_crc32(kZeroRegister, folded.data(), folded.size());
  }
  return libdeflate_crc32(so_far, bytes.data(), bytes.size());
}

std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_size) {
  return static_cast<std::uint32_t>(
      ::crc32_combine64(first, second, static_cast<z_off64_t>(second_size)));
}

// But for what depends on the size alone, a CRC-32 is linear in the bits of the text: that of a
// part among zeros, and of another, are that of both.
std::uint32_t crc32_term(std::uint32_t part, std::uint64_t size, std::uint64_t behind) {
  return crc32_combine(part ^ crc32_of_zeros(size), 0, behind);
}

void Crc32Terms::add(std::uint32_t part, std::uint64_t size, std::uint64_t end) {
  if (size != size_) {
    size_ = size;
    zeros_ = crc32_of_zeros(size);
  }
  if (end - end_ != step_) {
    step_ = end - end_;
    operator_ = static_cast<std::uint32_t>(crc32_combine_gen64(static_cast<z_off64_t>(step_)));
  }
  end_ = end;
  terms_ = static_cast<std::uint32_t>(crc32_combine_op(terms_, part ^ zeros_, operator_));
}

std::uint32_t Crc32Terms::of_text(std::uint64_t size) const {
  return crc32_combine(terms_, 0, size - end_);
}

std::uint32_t crc32_of_terms(std::uint32_t terms, std::uint64_t size) {
  return terms ^ crc32_of_zeros(size);
}

}  // namespace tessera
