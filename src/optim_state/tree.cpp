#include "optim_state/tree.h"

#include <torch/torch.h>

#include <utility>

#include "fsdp/state/redistribute.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

Value copy_of_tensor(const Tensor& tensor) {
  auto copy = tensor;
  for (auto& piece : copy.pieces) {
    if (!piece.storage) continue;
    const auto cloned = leaf_of(tensor_of_piece(tensor, piece).clone(at::MemoryFormat::Contiguous));
    piece.storage = cloned.pieces.front().storage;
    piece.storage_offset = 0;
    piece.strides = {};
  }
  return copy;
}

}  // namespace

Value map_tensors(const Value& tree, const std::function<Value(const Tensor&)>& make) {
  const auto all = [&make](const Value::List& items) {
    Value::List mapped;
    for (const auto& item : items) mapped.push_back(map_tensors(item, make));
    return mapped;
  };
  switch (tree.kind()) {
    case Value::Kind::tensor:
      return make(tree.as_tensor());
    case Value::Kind::dict: {
      std::vector<Value::Pair> pairs;
      for (const auto& [key, value] : tree.pairs())
        pairs.emplace_back(key, map_tensors(value, make));
      return Value::dict(std::move(pairs), tree.dict_kind());
    }
    case Value::Kind::list:
      return Value::list(all(tree.items()));
    case Value::Kind::tuple:
      return Value::tuple(all(tree.items()));
    default:
      return tree;
  }
}

Value deep_copy(const Value& tree) {
  return map_tensors(tree, copy_of_tensor);
}

}  // namespace tessera::detail
