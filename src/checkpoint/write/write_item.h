// The items that a conversion writes into a DCP checkpoint.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "format/dcp/dcp.h"
#include "tessera/leaf.h"

namespace tessera {

// A chunk of a tensor, or a value.
struct WriteItem {
  std::string name;
  Path path;
  bool is_tensor = false;
  DType dtype = DType::float32;  // tensors
  Shape shape;
  Box box;  // the chunk
  bool requires_grad = false;
  std::size_t leaf = 0;  // index of the leaf
};

// Leaf number `index` as an item, without its box.
[[nodiscard]] WriteItem item_of(const Leaf& leaf, std::size_t index);

// Where a written item ended up.
struct WrittenItem {
  std::size_t item = 0;  // index into the rank's items
  dcp::Item where;
};

// The `.metadata` of what was written: entries in order of first appearance, chunks in rank order.
[[nodiscard]] dcp::Metadata metadata_of(const std::vector<std::vector<WriteItem>>& items,
                                        const std::vector<std::vector<WrittenItem>>& written);

}  // namespace tessera
