// Ranges of bytes as HTTP names them.
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

// "bytes=3-9" for 7 bytes from 3 on. `size` is not 0.
[[nodiscard]] inline std::string range_text(std::uint64_t offset, std::uint64_t size) {
  return "bytes=" + std::to_string(offset) + "-" + std::to_string(offset + size - 1);
}
// Whether Content-Range is that of such an answer: "bytes 3-9/TOTAL".
[[nodiscard]] inline bool is_range_of(const std::string& content_range, std::uint64_t offset,
                                      std::uint64_t size, std::uint64_t total) {
  return content_range == "bytes " + std::to_string(offset) + "-" +
                              std::to_string(offset + size - 1) + "/" + std::to_string(total);
}

}  // namespace tessera
