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

Value deep_copy(const Value& tree) {
  const auto all = [](const Value::List& items) {
    Value::List copies;
    for (const auto& item : items) copies.push_back(deep_copy(item));
    return copies;
  };
  switch (tree.kind()) {
    case Value::Kind::tensor:
      return copy_of_tensor(tree.as_tensor());
    case Value::Kind::dict: {
      std::vector<Value::Pair> pairs;
      for (const auto& [key, value] : tree.pairs()) pairs.emplace_back(key, deep_copy(value));
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

}  // namespace tessera::detail
