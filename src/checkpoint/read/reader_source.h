// One piece of a tensor as TensorReader reads it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/crc32.h"
#include "checkpoint/read/reader.h"
#include "layout/plan.h"
#include "tessera/layout.h"
#include "value/storage_reader.h"

namespace tessera {

// A piece with raw bytes, and how far its checksum has been followed.
struct TensorReader::Source {
  // Runs of one storage that a reader's checksum follows: of more the storage is read again.
  static constexpr std::size_t kMaxFollowed = 1024;

  Piece piece;
  std::optional<DeviceReader> device = {};  // none: the piece is elsewhere
  Shape sizes;                              // of the piece's own array
  bool dense = true;                        // row-major without gaps
  bool scattered = false;                   // in a file, in another order
  std::uint64_t first_byte = 0;             // of the piece in its storage
  std::optional<bool> takes_all;            // see takes_all_common; of the planned target
  std::vector<ReadRun> runs;                // under running CRCs, in the order of reading
  bool followed = true;                     // false: they were too many
  std::uint64_t read = 0;                   // bytes read from the source
  bool checked = false;                     // the storage passed its CRC, or the job sees to it

  // Whether follow() looks at bytes.
  [[nodiscard]] bool follows() const { return followed && !checked && has_crc(*piece.storage); }

  // Whether the bytes are known to be those that were written, as far as anything can tell.
  [[nodiscard]] bool is_checked() const {
    const ByteSource* source = piece.storage->source.get();
    return checked || (source != nullptr && source->checked());
  }

  // Bytes [at, at + bytes.size()) of the storage have just been read.
  void follow(std::uint64_t at, ByteView bytes, const std::string& key) {
    if (!follows()) return;
    const Storage& storage = *piece.storage;
    if (runs.empty() || runs.back().end() != at) {
      if (runs.size() == kMaxFollowed) {
        followed = false;
        runs.clear();
        return;
      }
      runs.push_back({at, 0, 0});
    }
    ReadRun& run = runs.back();
    run.crc = tessera::crc32(bytes, run.crc);
    run.size += bytes.size();
    if (run.size != storage.size) return;
    require_crc(storage, run.crc, key);
    checked = true;
  }
};

// The runs of a piece that are worth reading together.

// Gaps that are shorter are always read over: a request of its own costs more than these bytes.
inline constexpr std::int64_t kFreeGapBytes = 4 << 10;  // near
// Longer gaps are read over only while they add less than one byte to so many that are needed.
inline constexpr std::int64_t kNeededPerGapByte = 20;
// Bytes that one request for several runs may span: it bounds the scratch memory.
inline constexpr std::int64_t kSpanBytes = 1 << 20;

// For each source piece the longest gap between two of its runs, in elements of `element` bytes,
// that is read over when `plan` is carried out; `free` has the bytes that are always read over, for
// each. Computed from the whole plan: a few small holes in large runs are closed, and regular ones
// that are larger than `free` (columns of a wide tensor) stay unread.
[[nodiscard]] std::vector<std::int64_t> gaps_to_close(std::span<const Copy> plan,
                                                      std::span<const std::int64_t> free,
                                                      std::size_t element);
// The free gap of a source where a request costs as much as so many bytes.
[[nodiscard]] inline std::int64_t free_gap_of(std::uint64_t request_cost) {
  return static_cast<std::int64_t>(
      std::clamp<std::uint64_t>(request_cost, kFreeGapBytes, kSpanBytes - 1));
}

}  // namespace tessera
