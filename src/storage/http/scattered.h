// Memory in several places that is filled as if it were one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tessera/io.h"

namespace tessera {

class Scattered {
 public:
  Scattered() = default;
  Scattered(MutableByteView one) { add(one); }  // NOLINT(google-explicit-constructor)

  void add(MutableByteView place) {
    places_.push_back({size_, place});
    size_ += place.size();
  }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }

  // `at + bytes.size()` is at most size().
  void write(std::uint64_t at, ByteView bytes) const {
    if (bytes.empty()) return;
    auto place =
        std::upper_bound(places_.begin(), places_.end(), at,
                         [](std::uint64_t offset, const Place& p) { return offset < p.at; });
    for (--place; !bytes.empty(); ++place) {
      const auto skip = static_cast<std::size_t>(at - place->at);
      const std::size_t size = std::min(bytes.size(), place->memory.size() - skip);
      if (size == 0) continue;
      std::memcpy(place->memory.data() + skip, bytes.data(), size);
      bytes = bytes.subspan(size);
      at += size;
    }
  }

 private:
  struct Place {
    std::size_t at = 0;  // of its first byte in all of them
    MutableByteView memory;
  };
  std::vector<Place> places_;
  std::size_t size_ = 0;
};

}  // namespace tessera
