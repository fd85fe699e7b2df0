// Trees whose tensors are in memory of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/load/fill.h"
#include "tessera/value.h"

namespace tessera {

// Memory of `bytes` bytes, not filled. Throws `limit` if there is none.
[[nodiscard]] std::shared_ptr<Storage> fresh_storage(DType dtype, std::uint64_t bytes);

// Copies trees of a checkpoint and gives each tensor in them, also those inside tuples, objects and
// attributes, memory that it owns. What has to be read for that is collected.
class FreshMemory {
 public:
  // `leaves` name the tensors of the trees.
  explicit FreshMemory(const std::vector<Leaf>& leaves);

  // A tensor of which no part is known (inside of an object) stays as it is. Throws `limit` for one
  // that is not bounded (reader.h) or for which there is no memory.
  [[nodiscard]] Value of(const Value& tree);

  // What is to be read into the memory given so far.
  [[nodiscard]] std::vector<Filling> take() { return std::move(fillings_); }

 private:
  [[nodiscard]] Value tensor(const Value& node);

  std::unordered_map<const void*, std::string> names_;  // by node
  std::vector<Filling> fillings_;
};

}  // namespace tessera
