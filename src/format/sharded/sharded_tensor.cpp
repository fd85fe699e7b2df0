// ShardedTensor (checkpoint-rows F-04): its local shards and the whole that they are a part of. The
// list of all ranks' shards, which it has too, says nothing that the ranks' own files do not.
#include "format/sharded/attributes.h"

namespace tessera::sharded {
namespace {

using Kind = Value::Kind;

constexpr std::string_view kShardPackage = "torch.distributed._shard";
constexpr std::size_t kStateParts = 5;

// Null: it has none.
const Value* pickled_state(const Object& object) {
  const bool is_tensor = !is_global(object.callable, kShardPackage, "ShardedTensor");
  if (is_tensor) return &object.arguments.items()[3];
  return object.state ? &*object.state : nullptr;  // torch up to 1.12: not a Tensor
}

// (shards, metadata, process group, sharding spec, init_rrefs)
const Value::List& state_of(const Value& value) {
  const Value* state = pickled_state(value.as_object());
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

// (dtype, layout, requires_grad, ...)
const Value::List& properties_of(const Value& metadata) {
  const Value& properties = attribute(metadata, "tensor_properties");
  const bool known = properties.is(Kind::object) && properties.as_object().state &&
                     properties.as_object().state->is(Kind::tuple) &&
                     properties.as_object().state->size() >= 3;
  if (!known) corrupt("tensor_properties are not those that are known");
  return properties.as_object().state->items();
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
  if (is_instance(value, kShardPackage, "ShardedTensor")) return value.as_object().by_new;
  return is_rebuilt_as(value, kShardPackage, "ShardedTensor");
}

Tensor read_sharded_tensor(const Value& value, const Rank& rank) {
  const Value::List& parts = state_of(value);
  const Value& metadata = attributes(parts[1], "ShardedTensorMetadata");
  const Value::List& fields = properties_of(metadata);
  Tensor tensor;
  tensor.dtype = dtype(fields[0]);
  tensor.requires_grad = fields[2] == Value(true);
  tensor.shape = shape(attribute(metadata, "size"), "size");
  tensor.sharded = true;
  require_group(parts[2], rank);
  for (const Value& shard : sequence(parts[0], "local_shards")) {
    add_unless_empty(tensor, shard_piece(shard, tensor, rank));
  }
  return tensor;
}

Local local_of_sharded_tensor(const Value& value) {
  const Value::List& parts = state_of(value);
  Local local{shape(attribute(attributes(parts[1], "ShardedTensorMetadata"), "size"), "size"), {}};
  for (const Value& shard : sequence(parts[0], "local_shards"))
    local.tensors.push_back(attribute(attributes(shard, "Shard"), "tensor"));
  return local;
}

std::optional<int> world_of(const Value& tree) {
  if (is_sharded_tensor(tree)) {
    const Value& group = state_of(tree)[2];
    if (!group.is(Kind::object)) return std::nullopt;
    const Value& state = attributes(group, "ProcessGroupState");
    const std::int64_t world = integer(attribute(state, "global_world_size"), "global_world_size");
    constexpr std::int64_t kMostRanks = 1 << 20;
    if (world < 1 || world > kMostRanks) corrupt("a ShardedTensor of no such number of ranks");
    return static_cast<int>(world);
  }
  if (is_dtensor(tree)) return ranks_of_dtensor(tree);
  if (!tree.is(Kind::dict)) return std::nullopt;
  for (const auto& [key, value] : tree.pairs()) {
    if (const auto world = world_of(value)) return world;
  }
  return std::nullopt;
}

}  // namespace tessera::sharded
