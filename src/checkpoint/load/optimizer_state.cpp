#include "tessera/optimizer_state.h"

#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/load/fresh.h"
#include "layout/boxes.h"
#include "tessera/error.h"
#include "tessera/group_checkpoint.h"

namespace tessera {
namespace {

constexpr const char* kPreparing = "preparing to load an optimizer's state";

// Null: the leaf is no part of a tree with keys.
const std::string* top_of(const Leaf& leaf) {
  return leaf.path.empty() ? nullptr : std::get_if<std::string>(&leaf.path.front());
}

[[noreturn]] void throw_without_key(const std::string& key, const Checkpoint& checkpoint) {
  std::set<std::string> tops;
  for (const auto& leaf : checkpoint.leaves) {
    if (const auto* top = top_of(leaf)) tops.insert(*top);
  }
  std::string text = "the checkpoint has nothing under this key; at its top are ";
  for (const auto& top : tops) text += (top == *tops.begin() ? "'" : ", '") + top + "'";
  throw Error(ErrorCode::not_found, tops.empty() ? "the checkpoint has no keys" : text).at_key(key);
}

// Memory for this rank's part of what is stored.
Tensor own_part(const Tensor& stored, const Group& group) {
  Tensor made;
  made.dtype = stored.dtype;
  made.shape = stored.shape;
  made.requires_grad = stored.requires_grad;
  made.sharded = numel(made.shape) != 1;
  const auto box =
      made.sharded ? chunk_of(whole(made.shape), 0, group.size(), group.rank()) : whole(made.shape);
  if (numel(box) > 0)
    made.pieces = {
        {box, fresh_storage(made.dtype, byte_size(made.dtype, box.sizes)), 0, {}, group.rank()}};
  return made;
}

// What `checkpoint` has under the key, with memory in the place of tensors.
Value wanted_tree(const std::string& key, const Checkpoint& checkpoint, const Group& group) {
  std::vector<Leaf> wanted;
  for (const auto& leaf : checkpoint.leaves) {
    const auto* top = top_of(leaf);
    if (top == nullptr || *top != key) continue;
    auto& own = wanted.emplace_back(leaf);
    if (leaf.value.is(Value::Kind::tensor)) own.value = own_part(leaf.value.as_tensor(), group);
  }
  if (wanted.empty()) throw_without_key(key, checkpoint);
  fill_holes(wanted);
  return unflatten(wanted);
}

// `load` is a load from what has these `contents`.
Value loaded_under(const std::string& key, const Checkpoint& contents, const LoadOptions& options,
                   Group& group, const std::function<void(Value& tree)>& load) {
  Value tree;
  agree(group, kPreparing, [&] {
    if (options.rename) {
      throw Error(ErrorCode::invalid_argument, "other names for the keys of a tree that has none");
    }
    tree = wanted_tree(key, contents, group);
  });
  load(tree);
  return tree;
}

}  // namespace

Value load_sharded_optimizer_state_dict(const std::string& optimizer_key,
                                        const Checkpoint& checkpoint, const LoadOptions& options,
                                        Group& group) {
  return loaded_under(optimizer_key, checkpoint, options, group,
                      [&](Value& tree) { load(tree, checkpoint, options, group); });
}

Value load_sharded_optimizer_state_dict(const std::string& optimizer_key, const Location& where,
                                        const LoadOptions& options, Group& group) {
  auto checkpoint = GroupCheckpoint::open(where, options, group);
  return loaded_under(optimizer_key, checkpoint.contents(), options, group,
                      [&](Value& tree) { checkpoint.load(tree, options); });
}

Value load_sharded_optimizer_state_dict(const std::string& optimizer_key, const Location& where,
                                        Group& group) {
  return load_sharded_optimizer_state_dict(optimizer_key, where, {}, group);
}

}  // namespace tessera
