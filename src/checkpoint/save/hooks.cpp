#include "checkpoint/save/hooks.h"

#include <span>
#include <unordered_map>
#include <utility>

#include "base/digest.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/select.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

// The elements stay as they are: readers convert.
void convert(Leaf& leaf, DType to) {
  Tensor tensor = leaf.value.as_tensor();
  const DType from = tensor.dtype;
  if (from == to) return;
  const std::string both = std::string(to_string(from)) + " to " + std::string(to_string(to));
  if (!can_cast(from, to))
    throw Error(ErrorCode::unsupported, "no conversion of " + both).at_key(leaf.name);
  if (can_wrap(from, to)) {
    throw Error(ErrorCode::invalid_argument,
                "what does not fit would become another number: " + both)
        .at_key(leaf.name);
  }
  tensor.stored = from;
  tensor.dtype = to;
  leaf.value = Value(std::move(tensor));
}

void rename_all(std::vector<Leaf>& leaves,
                const std::function<std::string(const std::string& key)>& name) {
  std::unordered_map<std::string, std::string> origins;  // by new name
  for (Leaf& leaf : leaves) {
    const std::string old = leaf.name;
    std::string given = name(old);
    if (given.empty()) throw Error(ErrorCode::conflict, "the key loses its name").at_key(old);
    const auto [other, is_new] = origins.emplace(given, old);
    if (!is_new) {
      throw Error(ErrorCode::conflict, "the keys '" + printable(other->second) + "' and '" +
                                           printable(old) + "' get one name")
          .at_key(given);
    }
    if (given != old) rename(leaf, std::move(given));
  }
}

}  // namespace

std::vector<Leaf> leaves_to_save(std::vector<Leaf> leaves, const SaveOptions& options) {
  if (options.name) rename_all(leaves, options.name);
  for (Leaf& leaf : leaves) {
    if (options.dtype && leaf.value.is(Value::Kind::tensor))
      convert(leaf, options.dtype(leaf.name, leaf.value.as_tensor()));
  }
  return leaves;
}

std::uint64_t digest_of_choices(const std::vector<PlannedLeaf>& leaves, int ranks,
                                const WriterFunction& writer) {
  if (!writer) return 0;
  RunningDigest digest;
  bool chooses = false;
  PlacedWalk walk(ranks, {ReplicaWriter::lowest_rank, writer});
  for (const PlannedLeaf& leaf : leaves) {
    if (!leaf.placement) continue;
    walk.leaf(leaf, [&](int, const PlacedPart& part) {
      if (part.holders == 1) return;
      digest.add(std::as_bytes(std::span(&part.writer, 1)));
      chooses = true;
    });
  }
  return chooses ? digest.value() : 0;
}

}  // namespace tessera
