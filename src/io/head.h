// How an object begins, which tells formats apart.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/io.h"

namespace tessera {

// The first `Size` bytes; zeros behind the object's end.
template <std::size_t Size>
[[nodiscard]] std::array<unsigned char, Size> head_of(const ByteSource& source) {
  std::array<unsigned char, Size> head{};
  const auto have = static_cast<std::size_t>(std::min<std::uint64_t>(Size, source.size()));
  source.read_at(0, std::as_writable_bytes(std::span(head)).first(have));
  return head;
}

}  // namespace tessera
