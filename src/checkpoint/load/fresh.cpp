#include "checkpoint/load/fresh.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "tessera/error.h"
#include "value/copy.h"
#include "value/inner_tensors.h"

namespace tessera {
namespace {

bool is_known(const Tensor& tensor) {
  const bool here = std::all_of(tensor.pieces.begin(), tensor.pieces.end(),
                                [](const Piece& piece) { return piece.storage != nullptr; });
  return here && (!tensor.pieces.empty() || numel(tensor.shape) == 0);
}

}  // namespace

std::shared_ptr<Storage> fresh_storage(DType dtype, std::uint64_t bytes) {
  auto storage = std::make_shared<Storage>();
  storage->owner = std::shared_ptr<void>(
      std::malloc(static_cast<std::size_t>(std::max<std::uint64_t>(bytes, 1))), std::free);
  if (!storage->owner)
    throw Error(ErrorCode::limit, "no memory for " + std::to_string(bytes) + " bytes");
  storage->data = static_cast<std::byte*>(storage->owner.get());
  storage->size = bytes;
  storage->dtype = dtype;
  return storage;
}

FreshMemory::FreshMemory(const std::vector<Leaf>& leaves) {
  for (NamedTensor& named : all_tensors(leaves))
    names_.emplace(named.tensor.identity(), std::move(named.name));
}

Value FreshMemory::of(const Value& tree) {
  return copy_tree(tree, [this](const Value& node) -> std::optional<Value> {
    if (!node.is(Value::Kind::tensor) || !is_known(node.as_tensor())) return std::nullopt;
    return tensor(node);
  });
}

Value FreshMemory::tensor(const Value& node) {
  Tensor made = node.as_tensor();
  const std::string& name = names_[node.identity()];
  try {
    require_bounded(made, name);
    made.pieces = {Piece{whole(made.shape),
                         fresh_storage(made.dtype, byte_size(made.dtype, made.shape)),
                         0,
                         {},
                         -1}};
  } catch (Error& error) {
    throw error.at_key(name);
  }
  if (made.attributes) made.attributes = std::make_shared<const Value>(of(*made.attributes));
  fillings_.push_back({name, Value(std::move(made)), node});
  return fillings_.back().wanted;
}

}  // namespace tessera
