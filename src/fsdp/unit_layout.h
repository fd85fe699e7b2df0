// Where the parameters of a unit lie in its two arrays: the gathered one and a rank's flat shard.
//
// Parameter i has `rows` rows of `row` elements. Rank r holds rows [r*chunk, (r+1)*chunk) that
// exist, chunk = ceil(rows/world) as torch.chunk cuts (spec P2). In a flat shard every parameter
// has room for a whole chunk, so that all ranks' shards have the same length; what a rank does not
// hold is zero. Pure integers.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/layout.h"

namespace tessera {

struct FlatEntry {
  std::int64_t rows = 0;
  std::int64_t row = 0;              // elements a row
  std::int64_t chunk = 0;            // rows a rank holds at most
  std::int64_t gathered_offset = 0;  // elements
  std::int64_t shard_offset = 0;     // elements

  [[nodiscard]] std::int64_t first_row(int rank) const noexcept;
  [[nodiscard]] std::int64_t row_count(int rank) const noexcept;  // 0 beyond the last row
  [[nodiscard]] std::int64_t chunk_elements() const noexcept { return chunk * row; }
};

struct FlatLayout {
  std::vector<FlatEntry> entries;
  std::int64_t gathered_elements = 0;
  std::int64_t shard_elements = 0;
};

// `alignment`: elements that every parameter of the gathered array starts at a multiple of. Throws
// `invalid_argument` for a shape without dimensions.
[[nodiscard]] FlatLayout make_flat_layout(const std::vector<Shape>& shapes, int world,
                                          std::int64_t alignment);

}  // namespace tessera
