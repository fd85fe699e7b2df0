#include "optim_state/tree.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/one_of.h"
#include "checkpoint/tree/tree.h"
#include "fsdp/state/redistribute.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

// `copy` makes a contiguous tensor of its own of one.
Value copy_of_tensor(const Tensor& tensor,
                     const std::function<at::Tensor(const at::Tensor&)>& copy) {
  auto made = tensor;
  for (auto& piece : made.pieces) {
    if (piece.storage) piece = piece_in(piece, copy(tensor_of_piece(tensor, piece)));
  }
  return made;
}

}  // namespace

Value map_children(const Value& tree, const std::function<Value(const Value&)>& make) {
  if (tree.is(Value::Kind::dict)) {
    std::vector<Value::Pair> pairs;
    for (const auto& [key, value] : tree.pairs()) pairs.emplace_back(key, make(value));
    return Value::dict(std::move(pairs), tree.dict_kind());
  }
  if (!is_one_of(tree.kind(), Value::Kind::list, Value::Kind::tuple)) return tree;
  Value::List made;
  for (const auto& item : tree.items()) made.push_back(make(item));
  return tree.is(Value::Kind::list) ? Value::list(std::move(made)) : Value::tuple(std::move(made));
}

Value map_tensors(const Value& tree, const std::function<Value(const Tensor&)>& make) {
  if (tree.is(Value::Kind::tensor)) return make(tree.as_tensor());
  return map_children(tree, [&](const Value& child) { return map_tensors(child, make); });
}

Value deep_copy(const Value& tree) {
  return map_tensors(tree, [](const Tensor& leaf) {
    return copy_of_tensor(
        leaf, [](const at::Tensor& piece) { return piece.clone(at::MemoryFormat::Contiguous); });
  });
}

Value host_copy(const Value& tree) {
  return map_tensors(tree, [](const Tensor& leaf) {
    return copy_of_tensor(leaf, [](const at::Tensor& piece) {
      return piece.to(at::kCPU, piece.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                      at::MemoryFormat::Contiguous);
    });
  });
}

Checkpoint checkpoint_of(const Value& tree) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = "memory";
  checkpoint.root = tree;
  checkpoint.leaves = leaves_of(tree);
  return checkpoint;
}

Value with_params(const Value& groups,
                  const std::function<Value::List(const Value::List&)>& params_of) {
  Value::List made;
  for (const auto& group : groups.items()) {
    auto params = params_of(group.at("params").items());
    auto copy = deep_copy(group);
    copy.set_item("params", Value::list(std::move(params)));
    made.push_back(std::move(copy));
  }
  return Value::list(std::move(made));
}

KeyOrder order_of(const Value& key) {
  if (key.is(Value::Kind::integer)) return key.as_int();
  return key.as_string();
}

Value stored_part(const Checkpoint& checkpoint, const Path& path) {
  std::vector<Leaf> below;
  for (const auto i : leaves_below(checkpoint, path)) {
    auto part = part_of(checkpoint.leaves[i], path.size());
    part.name = dotted(part.path);
    part.containers = nullptr;
    below.push_back(std::move(part));
  }
  return unflatten(below);
}

}  // namespace tessera::detail
