// The pickle of one rank's file: its ShardedTensors, DTensors and flat parameters, over storages
// that hold zeros. Reading with and without the shard lists agrees about what is left.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "format/pickle/pickle.h"
#include "format/sharded/sharded.h"
#include "format/torch/rebuild.h"
#include "target.h"
#include "tessera/error.h"
#include "tessera/leaf.h"

namespace tessera::fuzz {
namespace {

constexpr std::string_view kClasses[] = {"torch.distributed._shard.metadata ShardMetadata",
                                         "torch.distributed.remote_device _remote_device",
                                         "torch device"};
constexpr pickle::SkipRule::Attribute kLists[] = {
    {"torch.distributed._shard.sharded_tensor.metadata ShardedTensorMetadata", "shards_metadata"},
    {"torch.distributed._shard.sharding_spec.chunk_sharding_spec ChunkShardingSpec", "placements"}};
constexpr std::int64_t kMaxElements = 1 << 16;

Value load(const Value& id) {
  torch_file::StorageId parsed = torch_file::parse_storage_id(id, 5);
  if (parsed.count < 0 || parsed.count > kMaxElements) {
    throw Error(ErrorCode::limit, "a storage larger than a seed's");
  }
  Storage storage;
  storage.size = static_cast<std::uint64_t>(parsed.count) * size_of(parsed.kept.dtype);
  storage.source = memory_source(std::vector<std::byte>(storage.size), "zeros");
  return torch_file::bare_storage(std::move(parsed), std::move(storage));
}

// The tensors: other values, and keys that name a leaf, may refer to a list that the rule skips.
std::vector<Leaf> tensors(const Value& tree) {
  std::vector<Leaf> leaves = flatten(tree);
  std::erase_if(leaves, [](const Leaf& leaf) { return !leaf.value.is(Value::Kind::tensor); });
  return leaves;
}

Value tree_of(ByteView input, bool skip) {
  pickle::ReadOptions options;
  options.max_nodes = 100'000;
  options.persistent_load = load;
  options.reduce = torch_file::rebuild_tensor;
  if (skip) options.skip = pickle::SkipRule{kLists, kClasses};
  Value tree = pickle::read(input, options).value;
  if (tree.is(Value::Kind::dict) && tree.find("modules") != nullptr) {
    (void)sharded::flat_handles(tree);
  }
  sharded::resolve(tree, {0, 2});
  return tree;
}

}  // namespace

void parse(ByteView input) {
  const std::vector<Leaf> all = tensors(tree_of(input, false));
  const std::vector<Leaf> less = tensors(tree_of(input, true));
  const bool same = std::equal(all.begin(), all.end(), less.begin(), less.end(),
                               [](const Leaf& a, const Leaf& b) { return a.value == b.value; });
  if (!same) throw std::logic_error("a list that is not the rule's was skipped");
}

}  // namespace tessera::fuzz
