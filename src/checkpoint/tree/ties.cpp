#include "checkpoint/tree/ties.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "base/one_of.h"
#include "checkpoint/dcp/sharding_info.h"
#include "checkpoint/digests/safetensors_digests.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/tree/tree_json.h"
#include "layout/boxes.h"

namespace tessera {
namespace {

// Where the elements of a tensor in one piece are, and what they are taken for: memory; source,
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
  return can_be_noted(name) && (is_ours || last_step(name) == last_step(kept));
}

std::vector<std::size_t> ties_of(const std::vector<Leaf>& leaves) {
  std::vector<std::size_t> kept(leaves.size());
  std::map<SamePlace, std::vector<std::size_t>> at;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    kept[i] = i;
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
    if (!is_note(name, kept, is_ours)) continue;
    index_names();
    if (by_name_.contains(name)) continue;
    const auto found = by_name_.find(kept);
    if (found == by_name_.end()) continue;
    // One value for all notes of a tensor: it may have many pieces.
    Value& tied = tied_[found->second];
    if (tied.is(Value::Kind::none)) tied = tied_to(leaves_[found->second].value.as_tensor());
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
