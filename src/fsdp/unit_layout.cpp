#include "fsdp/flat_layout.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera {

std::int64_t FlatEntry::first_row(int rank) const noexcept {
  return std::min(rank * chunk, rows);
}

std::int64_t FlatEntry::row_count(int rank) const noexcept {
  return std::clamp<std::int64_t>(rows - rank * chunk, 0, chunk);
}

FlatLayout make_flat_layout(const std::vector<Shape>& shapes, int world, std::int64_t alignment) {
  FlatLayout layout;
  for (const auto& shape : shapes) {
    if (shape.empty()) {
      throw Error(
          ErrorCode::invalid_argument,
          "fully_shard doesn't support scalar parameters; make it a 1D tensor of one element");
    }
    FlatEntry entry;
    entry.rows = shape.front();
    entry.row = 1;
    for (std::size_t d = 1; d < shape.size(); ++d) entry.row *= shape[d];
    entry.chunk = (entry.rows + world - 1) / world;
    entry.gathered_offset = layout.gathered_elements;
    entry.shard_offset = layout.shard_elements;
    const auto aligned = (entry.rows * entry.row + alignment - 1) / alignment * alignment;
    layout.gathered_elements += aligned;
    layout.shard_elements += entry.chunk_elements();
    layout.entries.push_back(entry);
  }
  return layout;
}

}  // namespace tessera
