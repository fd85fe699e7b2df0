// A state of float32 tensors for ranks that save and load it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layout/boxes.h"
#include "tessera/checkpoint.h"

namespace tessera::bench {

struct StateSize {
  std::int64_t bytes = 0;  // of all tensors
  int ranks = 2;           // each has its rows of each tensor
  std::int64_t tensor_bytes = 64 << 20;
};

// One rank's tree; its memory is touched.
class RankState {
 public:
  RankState(const StateSize& size, int rank) {
    const std::int64_t columns =
        std::clamp<std::int64_t>(size.tensor_bytes / 4 / size.ranks, 1, 1024);
    const Shape shape{std::max<std::int64_t>(size.tensor_bytes / 4 / columns, 1), columns};
    const Placement placement{.parts = size.ranks};
    std::vector<Value::Pair> pairs;
    for (std::int64_t i = 0; i < std::max<std::int64_t>(size.bytes / size.tensor_bytes, 1); ++i) {
      Tensor tensor;
      tensor.shape = shape;
      tensor.sharded = true;
      tensor.placement = placement;
      for (Box& box : boxes_of_part(placement, shape, rank)) {
        auto& memory = memory_.emplace_back(static_cast<std::size_t>(numel(box)), 1.0F + rank);
        auto storage = std::make_shared<Storage>();
        storage->data = reinterpret_cast<std::byte*>(memory.data());
        storage->size = memory.size() * sizeof(float);
        bytes_ += storage->size;
        tensor.pieces.push_back({std::move(box), std::move(storage), 0, {}, -1});
      }
      pairs.emplace_back("tensor" + std::to_string(i), std::move(tensor));
    }
    tree_ = Value::dict(std::move(pairs));
  }

  [[nodiscard]] Value& tree() { return tree_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::vector<std::vector<float>> memory_;
  Value tree_;
  std::size_t bytes_ = 0;
};

}  // namespace tessera::bench
