#include "checkpoint/open/tree.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/text.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/missing.h"
#include "checkpoint/read/safetensors_digests.h"
#include "layout/boxes.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

std::map<std::string_view, const void*> nodes_by_name(const std::vector<Leaf>& leaves) {
  std::map<std::string_view, const void*> nodes;
  for (const Leaf& leaf : leaves) nodes.emplace(leaf.name, leaf.value.identity());
  return nodes;
}

// Whether nobody has taken away or replaced a leaf since the checkpoint was opened.
bool has_all_leaves(const Checkpoint& checkpoint) {
  const auto nodes = nodes_by_name(checkpoint.leaves);
  return std::ranges::all_of(leaves_of(*checkpoint.root), [&nodes](const Leaf& leaf) {
    const auto found = nodes.find(leaf.name);
    return found != nodes.end() && found->second == leaf.value.identity();
  });
}

// Whether `there` is the step `wanted`, or a name that it has.
bool is_text_of(const PathPart& wanted, const PathPart& there) {
  const auto* key = std::get_if<DictKey>(&wanted);
  const auto* name = std::get_if<std::string>(&there);
  return key != nullptr && name != nullptr ? key->text == *name : wanted == there;
}

template <typename IsStep>
std::vector<std::size_t> leaves_below(const Checkpoint& checkpoint, const Path& path,
                                      IsStep is_step) {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < checkpoint.leaves.size(); ++i) {
    const Path& way = checkpoint.leaves[i].path;
    if (way.size() > path.size() &&
        std::ranges::equal(path, std::span(way).first(path.size()), is_step))
      found.push_back(i);
  }
  return found;
}

}  // namespace

Value shared_tree(const Checkpoint& checkpoint) {
  if (checkpoint.root && has_all_leaves(checkpoint)) return *checkpoint.root;
  try {
    return unflatten(checkpoint.leaves);
  } catch (Error& error) {
    throw error.at_path(checkpoint.path);
  }
}

std::vector<std::size_t> leaves_below(const Checkpoint& checkpoint, const Path& path) {
  const auto same = [](const PathPart& wanted, const PathPart& there) { return wanted == there; };
  auto found = leaves_below(checkpoint, path, same);
  return found.empty() ? leaves_below(checkpoint, path, is_text_of) : found;
}

Leaf part_of(const Leaf& leaf, std::size_t steps) {
  const auto count = static_cast<std::ptrdiff_t>(steps);
  Leaf part = leaf;
  part.path.erase(part.path.begin(), part.path.begin() + count);
  if (leaf.containers) {
    part.containers = std::make_shared<const Containers>(leaf.containers->begin() + count,
                                                         leaf.containers->end());
  }
  return part;
}

Value Checkpoint::tree() const {
  // What stands for a value that nobody can read is no value. A tensor's elements are read later.
  for (const Leaf& leaf : leaves)
    if (is_missing_value(leaf.value)) require_here(leaf);
  return copy_tree(shared_tree(*this));
}

namespace {

// The place of the elements of a tensor in one piece, and what they are taken for: memory; source,
// offset, size and encoding of the bytes in it; first element, strides, shape; types; lazy bits.
using SamePlace = std::tuple<const void*, const void*, std::uint64_t, std::uint64_t, Encoding,
                             std::int64_t, Shape, Shape, DType, std::optional<DType>, bool, bool>;

// One element is never tied: nothing is gained, and numbers that an optimizer counts by itself for
// each parameter, as its steps, must not become one object.
std::optional<SamePlace> place_of(const Value& value) {
  if (!value.is(Value::Kind::tensor)) return std::nullopt;
  const Tensor& tensor = value.as_tensor();
  if (tensor.bare_storage || tensor.pieces.size() != 1 || numel(tensor.shape) <= 1)
    return std::nullopt;
  const Piece& piece = tensor.pieces[0];
  if (!piece.storage || piece.slice != Slice(whole(tensor.shape))) return std::nullopt;
  const Storage& storage = *piece.storage;
  const void* const memory = storage.device ? static_cast<const void*>(&storage) : storage.data;
  return SamePlace{memory,           storage.source.get(), storage.offset,    storage.size,
                   storage.encoding, piece.storage_offset, strides_of(piece), tensor.shape,
                   tensor.dtype,     tensor.stored,        piece.conj,        piece.neg};
}

// Where the elements of a tensor of one piece begin.
using Begin = std::tuple<const void*, std::uint64_t, std::int64_t>;

std::optional<Begin> begin_of(const Value& value) {
  if (!value.is(Value::Kind::tensor) || value.as_tensor().pieces.size() != 1) return std::nullopt;
  const Piece& piece = value.as_tensor().pieces[0];
  if (!piece.storage) return std::nullopt;
  const Storage& storage = *piece.storage;
  if (storage.source) return Begin{storage.source.get(), storage.offset, piece.storage_offset};
  const void* const memory = storage.device ? static_cast<const void*>(&storage) : storage.data;
  return Begin{memory, 0, piece.storage_offset};
}

// The leaves, by index, that begin where another one does.
std::vector<std::size_t> sharing_a_begin(const std::vector<Leaf>& leaves) {
  std::vector<std::pair<Begin, std::size_t>> begins;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (const auto begin = begin_of(leaves[i].value)) begins.emplace_back(*begin, i);
  }
  std::ranges::sort(begins);
  const auto is_at = [&](std::size_t one, std::size_t other) {
    return other < begins.size() && begins[one].first == begins[other].first;
  };
  std::vector<std::size_t> sharing;
  for (std::size_t i = 0; i < begins.size(); ++i) {
    if ((i > 0 && is_at(i, i - 1)) || is_at(i, i + 1)) sharing.push_back(begins[i].second);
  }
  std::ranges::sort(sharing);
  return sharing;
}

std::string_view last_step(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

// What a note makes of the tensor that it names.
Value tied_to(const Tensor& tensor) {
  Tensor tied = tensor;
  tied.parameter = tied.requires_grad = false;
  tied.attributes = nullptr;
  return Value(std::move(tied));
}

}  // namespace

bool is_about_files(const std::string& key) {
  return is_one_of(key, kTreeKey, kShardingKey, kTiesKey, "DCP_VERSION") || is_digest_key(key);
}

bool can_be_noted(const std::string& name) {
  return !is_about_files(name) && !is_one_of(name, "format", "__metadata__");
}

bool is_note(const std::string& name, const std::string& kept, bool is_ours) {
  const bool are_paths = last_step(name) != name && last_step(kept) != kept;
  return can_be_noted(name) && (is_ours || are_paths || last_step(name) == last_step(kept));
}

std::vector<std::size_t> ties_of(const std::vector<Leaf>& leaves) {
  std::vector<std::size_t> kept(leaves.size());
  std::iota(kept.begin(), kept.end(), std::size_t{0});
  std::map<SamePlace, std::vector<std::size_t>> at;
  // Nearly all begin where no other one does, and there may be a million.
  for (const std::size_t i : sharing_a_begin(leaves)) {
    if (auto place = place_of(leaves[i].value)) at[std::move(*place)].push_back(i);
  }
  for (const auto& [place, tied] : at) {
    const std::size_t first = *std::ranges::min_element(
        tied, {}, [&leaves](std::size_t i) -> const std::string& { return leaves[i].name; });
    for (const std::size_t i : tied) kept[i] = first;
  }
  return kept;
}

void Notes::index_names() {
  if (!by_name_.empty()) return;
  for (std::size_t i = 0; i < leaves_.size(); ++i) by_name_.emplace(leaves_[i].name, i);
}

void Notes::add(const std::map<std::string, std::string>& metadata) {
  const bool is_ours = metadata.contains(kTiesKey);
  for (const auto& [name, kept] : metadata) {
    if (!can_be_noted(name)) continue;
    index_names();
    if (by_name_.contains(name)) continue;
    const auto found = by_name_.find(kept);
    if (found == by_name_.end()) continue;
    if (!is_note(name, kept, is_ours)) {
      doubts_.push_back("the metadata '" + printable(name, 200) + "' is the name of the tensor '" +
                        printable(kept, 200) +
                        "': it stays metadata and is no tied tensor, because the names end in "
                        "different ways");
      continue;
    }
    // One value for all notes of a tensor: it may have many pieces.
    Value& tied = tied_[found->second];
    const Value& noted = leaves_[found->second].value;
    if (tied.is(Value::Kind::none))
      tied = is_missing_value(noted) ? noted : tied_to(noted.as_tensor());
    noted_.emplace(name, Leaf{name, Path{name}, tied});
  }
}

std::vector<Leaf> Notes::take() {
  std::vector<Leaf> leaves;
  for (auto& [name, leaf] : noted_) leaves.push_back(std::move(leaf));
  noted_.clear();
  return leaves;
}

}  // namespace tessera
