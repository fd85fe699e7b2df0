#include "checkpointer/proof.h"

#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/leaf.h"

namespace tessera::detail {
namespace {

// The tensors of the tree that the checkpoint has with the same type; the same on every rank. Not
// numbers of steps: a rank that holds nothing of a parameter does not count them.
Value comparable(const Value& tree, const GroupCheckpoint& checkpoint) {
  auto found = Value::dict();
  const Checkpoint& contents = checkpoint.contents();
  for (const auto& leaf : flatten(tree)) {
    // A rank's own files lack the optimizer's state of what it holds nothing of.
    if (checkpoint.is_own() && !leaf.name.starts_with("model.")) continue;
    if (!leaf.value.is(Value::Kind::tensor) || leaf.value.as_tensor().shape.empty()) continue;
    const auto* stored = contents.find(leaf.name);
    if (stored == nullptr || !stored->value.is(Value::Kind::tensor)) continue;
    if (stored->value.as_tensor().dtype == leaf.value.as_tensor().dtype)
      found.set_item(leaf.name, leaf.value);
  }
  return found;
}

void require_equal(const StateDigests& loaded, const StateDigests& saved) {
  std::vector<std::string> differ;
  for (const auto& [name, digest] : loaded) {
    const auto known = saved.find(name);
    if (known != saved.end() && known->second != digest) differ.push_back(name);
  }
  if (differ.empty()) return;
  throw Error(ErrorCode::mismatch, std::to_string(differ.size()) +
                                       " tensors are not what was saved, by their digests; the "
                                       "first is this")
      .at_key(differ.front());
}

}  // namespace

void require_as_saved(const Value& tree, const GroupCheckpoint& checkpoint, int threads,
                      const LoadedSums& loaded_sums, Group& group) {
  constexpr const char* kOperation = "comparing what was restored with what was saved";
  StateDigests saved;
  Bytes has_digests(1);
  agree(group, kOperation, [&] {
    if (group.rank() > 0) return;
    const auto& store = checkpoint.contents().store;
    if (store) saved = saved_digests(*store);
    has_digests[0] = std::byte{static_cast<unsigned char>(saved.empty() ? 0 : 1)};
  });
  if (group.spread(has_digests)[0] == std::byte{0}) return;
  const auto loaded = state_digests(comparable(tree, checkpoint), group, threads, &loaded_sums);
  agree(group, kOperation, [&] {
    if (group.rank() == 0) require_equal(loaded, saved);
  });
}

}  // namespace tessera::detail
