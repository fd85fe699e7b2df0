// How reads from far away are divided into requests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/range.h"
#include "storage/http/scattered.h"
#include "tessera/io.h"

namespace tessera {

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

}  // namespace tessera
