// ShardedTensor (F-04): its local shards and the whole that they are a part of. The list of all
// ranks' shards, which it has too, says nothing that the ranks' own files do not.
#include "format/sharded/attributes.h"

namespace tessera::sharded {
namespace {

using Kind = Value::Kind;

constexpr std::string_view kPackage = "torch.distributed._shard";
constexpr std::size_t kStateParts = 5;

// (shards, metadata, process group, sharding spec, init_rrefs)
const Value::List& state_of(const Value& value) {
  const Object& object = value.as_object();
  const Value* state = nullptr;
  if (is_global(object.callable, kPackage, "ShardedTensor")) {  // torch up to 1.12: not a Tensor
    state = object.state ? &*object.state : nullptr;
  } else {
    state = &object.arguments.items()[3];
  }
  if (state == nullptr || !state->is(Kind::tuple) || state->size() != kStateParts) {
    corrupt("a ShardedTensor's state is not the five parts that are known");
  }
  return state->items();
}

void require_group(const Value& group, const Rank& rank) {
  if (!group.is(Kind::object)) return;
  const Value& state = attributes(group, "ProcessGroupState");
  require_world(integer(attribute(state, "global_world_size"), "global_world_size"), rank);
  require_rank(integer(attribute(state, "global_rank"), "global_rank"), rank);
}

Piece shard_piece(const Value& shard, const Tensor& whole, const Rank& rank) {
  const Value& state = attributes(shard, "Shard");
  const Value& metadata = attributes(attribute(state, "metadata"), "ShardMetadata");
  Box box{shape(attribute(metadata, "shard_offsets"), "shard_offsets"),
          shape(attribute(metadata, "shard_sizes"), "shard_sizes")};
  if (const Value* placement = optional_attribute(metadata, "placement")) {
    const Value& device = attributes(*placement, "_remote_device");
    if (const Value* of = optional_attribute(device, "_rank")) {
      require_rank(integer(*of, "a shard's rank"), rank);
    }
  }
  return piece_of(attribute(state, "tensor"), whole, std::move(box), rank.rank);
}

}  // namespace

bool is_sharded_tensor(const Value& value) {
  if (!value.is(Kind::object)) return false;
  const Object& object = value.as_object();
  if (is_global(object.callable, kPackage, "ShardedTensor")) return object.by_new;
  return is_global(object.callable, "torch._tensor", "_rebuild_from_type_v2") &&
         object.arguments.size() == 4 &&
         is_global(object.arguments.items()[1], kPackage, "ShardedTensor");
}

Tensor read_sharded_tensor(const Value& value, const Rank& rank) {
  const Value::List& parts = state_of(value);
  const Value& metadata = attributes(parts[1], "ShardedTensorMetadata");
  const Value& properties = attribute(metadata, "tensor_properties");
  const bool known = properties.is(Kind::object) && properties.as_object().state &&
                     properties.as_object().state->is(Kind::tuple) &&
                     properties.as_object().state->size() >= 3;
  if (!known) corrupt("tensor_properties are not those that are known");
  const Value::List& fields = properties.as_object().state->items();
  Tensor tensor;
  tensor.dtype = dtype(fields[0]);
  tensor.requires_grad = fields[2] == Value(true);
  tensor.shape = shape(attribute(metadata, "size"), "size");
  tensor.sharded = true;
  require_group(parts[2], rank);
  for (const Value& shard : sequence(parts[0], "local_shards")) {
    Piece piece = shard_piece(shard, tensor, rank);
    if (numel(piece.slice) > 0) tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

}  // namespace tessera::sharded
