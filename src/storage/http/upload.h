// The body of a request as libcurl asks for it: straight from the caller's memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tessera/io.h"

namespace tessera {

class Upload {
 public:
  explicit Upload(const std::vector<ByteView>& pieces) : pieces_(pieces) {
    for (const ByteView piece : pieces) size_ += piece.size();
  }

  [[nodiscard]] std::uint64_t size() const { return size_; }
  [[nodiscard]] std::uint64_t sent() const { return sent_; }
  // Copies the next bytes to `out`, as many as there are and fit. Returns how many.
  std::size_t read(MutableByteView out) {
    std::size_t done = 0;
    while (done < out.size() && piece_ < pieces_.size()) {
      const ByteView rest = pieces_[piece_].subspan(offset_);
      const std::size_t count = std::min(rest.size(), out.size() - done);
      if (count != 0) std::memcpy(out.data() + done, rest.data(), count);
      done += count;
      offset_ += count;
      if (count == rest.size()) {
        ++piece_;
        offset_ = 0;
      }
    }
    sent_ += done;
    return done;
  }

 private:
  const std::vector<ByteView>& pieces_;
  std::uint64_t size_ = 0;
  std::uint64_t sent_ = 0;
  std::size_t piece_ = 0;   // the next byte is in this piece
  std::size_t offset_ = 0;  // there
};

}  // namespace tessera
