// Ranges of bytes as HTTP names them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "io/source.h"
#include "tessera/io.h"

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

// Memory in several places that is filled as if it were one.

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
    std::size_t at = 0;  // offset of its first byte in the whole
    MutableByteView memory;
  };
  std::vector<Place> places_;
  std::size_t size_ = 0;
};

// How reads from far away are divided into requests.

// What a request costs as much as: 10 ms on a connection with 100 MB/s.
inline constexpr std::uint64_t kFarRequest = 1U << 20U;  // bytes
inline constexpr int kReadAtOnce = 16;                   // requests of one read

struct RemotePiece {
  std::uint64_t offset = 0;
  Scattered out;  // not empty: no header can ask for no bytes

  [[nodiscard]] std::uint64_t end() const { return offset + out.size(); }
};

// What is asked for by one request each, for ranges that `source` has: those that follow one
// another go together, and long ones are divided, because one connection does not fill a fast
// network.
[[nodiscard]] inline std::vector<RemotePiece> pieces_of(const ByteSource& source,
                                                        std::span<const ReadRange> ranges) {
  constexpr std::size_t kPiece = 32U << 20U;
  std::vector<RemotePiece> pieces;
  for (const ReadRange& range : ranges) {
    require_range(source, range.offset, range.out.size());
    for (std::size_t done = 0; done < range.out.size();) {
      const std::uint64_t at = range.offset + done;
      const bool goes_on =
          !pieces.empty() && pieces.back().end() == at && pieces.back().out.size() < kPiece;
      if (!goes_on) pieces.push_back({at, {}});
      Scattered& out = pieces.back().out;
      const std::size_t size = std::min(kPiece - out.size(), range.out.size() - done);
      out.add(range.out.subspan(done, size));
      done += size;
    }
  }
  return pieces;
}

// A source far away, whose reads are requests that go at once.
class FarSource : public ByteSource {
 public:
  [[nodiscard]] std::uint64_t request_cost() const final { return kFarRequest; }
  void read_at(std::uint64_t offset, MutableByteView out) const final {
    const ReadRange range{offset, out};
    read_ranges({&range, 1});
  }
  void read_ranges(std::span<const ReadRange> ranges) const final {
    const std::vector<RemotePiece> pieces = pieces_of(*this, ranges);
    parallel_for(most_at_once(), pieces.size(),
                 [&](std::size_t i) { read_piece(pieces[i].offset, pieces[i].out); });
  }

 protected:
  // By one request. Called by several threads at once.
  virtual void read_piece(std::uint64_t offset, const Scattered& out) const = 0;
  [[nodiscard]] virtual int most_at_once() const { return kReadAtOnce; }
};

}  // namespace tessera
