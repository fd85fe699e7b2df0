#include "checkpoint/open/rank_merge.h"

#include <algorithm>
#include <set>

#include "checkpoint/read/same_elements.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

bool is_train_state(const std::string& name) {
  return name.starts_with(std::string(kTrainState) + ".");
}

bool is_sharded(const Value& value) {
  return value.is(Kind::tensor) && value.as_tensor().sharded;
}

bool same(const Leaf& a, const Leaf& b) {
  const bool tensors = a.value.is(Kind::tensor) && b.value.is(Kind::tensor);
  return tensors ? same_elements(a.value.as_tensor(), b.value.as_tensor(), a.name)
                 : a.value == b.value;
}

std::string described(const Value& value) {
  if (!value.is(Kind::tensor)) return render(value, 60);
  const Tensor& tensor = value.as_tensor();
  return std::string(to_string(tensor.dtype)) + " " + to_string(tensor.shape);
}

[[noreturn]] void refuse(ErrorCode code, int rank, const Leaf& leaf, const Leaf& known) {
  throw Error(code, "rank 0 has " + described(known.value) + ", rank " + std::to_string(rank) +
                        " has " + described(leaf.value))
      .at_key(leaf.name);
}

// The order of slices that puts equal ones side by side.
bool before(const Slice& a, const Slice& b) {
  if (a.index() != b.index()) return a.index() < b.index();
  if (const auto* range = std::get_if<FlatRange>(&a)) {
    const auto& other = std::get<FlatRange>(b);
    return std::pair(range->begin, range->end) < std::pair(other.begin, other.end);
  }
  const Box& box = std::get<Box>(a);
  const Box& other = std::get<Box>(b);
  return std::tie(box.offsets, box.sizes) < std::tie(other.offsets, other.sizes);
}

// Of a tensor without elements.
Piece empty_piece(const Tensor& tensor) {
  auto nothing = std::make_shared<Storage>();
  nothing->dtype = tensor.dtype;
  nothing->source = memory_source({}, "no elements");
  return Piece{whole(tensor.shape), std::move(nothing), 0, {}, -1};
}

// Of pieces of one slice the first stays. Returns the others.
std::vector<Piece> take_replicas(std::vector<Piece>& pieces) {
  const auto slice_less = [](const Slice* a, const Slice* b) { return before(*a, *b); };
  std::set<const Slice*, decltype(slice_less)> seen(slice_less);
  std::vector<bool> keep;
  for (const Piece& piece : pieces) keep.push_back(seen.insert(&piece.slice).second);
  std::size_t at = 0;
  std::vector<Piece> kept;
  std::vector<Piece> others;
  for (Piece& piece : pieces) (keep[at++] ? kept : others).push_back(std::move(piece));
  pieces = std::move(kept);
  return others;
}

// By rank, without those that a lower rank has too, which are returned. A tensor without elements
// keeps an empty piece.
std::vector<Piece> put_in_order(Tensor& tensor) {
  auto& pieces = tensor.pieces;
  if (pieces.empty() && numel(tensor.shape) == 0) {
    pieces.push_back(empty_piece(tensor));
    return {};
  }
  std::ranges::stable_sort(pieces, {}, &Piece::rank);
  return take_replicas(pieces);
}

// The tensor with these pieces of it.
Leaf with_pieces(const Leaf& leaf, std::vector<Piece> pieces) {
  Tensor tensor = leaf.value.as_tensor();
  tensor.pieces = std::move(pieces);
  return Leaf{leaf.name, leaf.path, Value(std::move(tensor))};
}

void warn_of_differences(const std::vector<std::string>& names,
                         std::vector<std::string>& warnings) {
  if (names.empty()) return;
  std::string text = "rank 0's values are kept where ranks differ: " + names[0];
  if (names.size() > 1) text += " and " + std::to_string(names.size() - 1) + " more";
  warnings.push_back(std::move(text));
}

}  // namespace

void RankMerge::add(int rank, Value tree) {
  std::vector<Leaf> leaves = flatten(tree);
  const std::lock_guard lock(mutex_);
  if (rank == 0) return begin(std::move(tree), std::move(leaves));
  for (Leaf& leaf : leaves) {
    const auto known = leaves_.find(leaf.name);
    if (known == leaves_.end()) {
      late_.push_back({rank, std::move(leaf)});
    } else {
      merge(rank, leaf, known->second);
    }
  }
}

void RankMerge::begin(Value tree, std::vector<Leaf> leaves) {
  tree_ = std::move(tree);
  for (Leaf& leaf : leaves) leaves_.emplace(leaf.name, std::move(leaf));
}

void RankMerge::merge(int rank, const Leaf& leaf, const Leaf& known) {
  if (is_sharded(leaf.value) || is_sharded(known.value)) return add_pieces(rank, leaf, known);
  if (same(known, leaf)) return;
  if (!is_train_state(leaf.name)) refuse(ErrorCode::mismatch, rank, leaf, known);
  differ_.push_back(leaf.name);
}

void RankMerge::add_pieces(int rank, const Leaf& leaf, const Leaf& known) {
  if (!is_sharded(leaf.value) || !is_sharded(known.value) ||
      !same_form(leaf.value.as_tensor(), known.value.as_tensor())) {
    refuse(ErrorCode::corrupt, rank, leaf, known);
  }
  const Tensor& more = leaf.value.as_tensor();
  Value handle = known.value;
  Tensor& tensor = handle.as_tensor();
  tensor.pieces.insert(tensor.pieces.end(), more.pieces.begin(), more.pieces.end());
}

std::optional<Value> RankMerge::place_of(const Path& path) {
  Value at = tree_;
  for (std::size_t i = 0; i + 1 < path.size(); ++i) {
    const std::optional<Value> key = key_of_step(path[i]);
    if (!key || !at.is(Kind::dict)) return std::nullopt;
    if (at.find_key(*key) == nullptr) at.set_item(*key, Value::dict());
    at = Value(*at.find_key(*key));
  }
  return at.is(Kind::dict) ? std::optional(at) : std::nullopt;
}

void RankMerge::insert(int rank, const Leaf& leaf) {
  std::optional<Value> at = place_of(leaf.path);
  const std::optional<Value> key = leaf.path.empty() ? std::nullopt : key_of_step(leaf.path.back());
  if (!key || !at) {
    throw Error(ErrorCode::mismatch, "rank " + std::to_string(rank) + " has it, rank 0 does not")
        .at_key(leaf.name);
  }
  at->set_item(*key, leaf.value);
  leaves_.emplace(leaf.name, leaf);
}

void RankMerge::add_late() {
  std::ranges::stable_sort(late_, {}, &Late::rank);
  for (const Late& late : late_) {
    if (is_train_state(late.leaf.name)) {
      differ_.push_back(late.leaf.name);
      continue;
    }
    const auto known = leaves_.find(late.leaf.name);
    if (known == leaves_.end()) {
      insert(late.rank, late.leaf);
    } else {
      merge(late.rank, late.leaf, known->second);
    }
  }
}

Merged RankMerge::finish() {
  const std::lock_guard lock(mutex_);
  add_late();
  Merged merged;
  for (auto& [name, leaf] : leaves_) {
    if (!is_sharded(leaf.value)) continue;
    std::vector<Piece> others = put_in_order(leaf.value.as_tensor());
    if (!others.empty()) merged.replicas.push_back(with_pieces(leaf, std::move(others)));
  }
  std::sort(differ_.begin(), differ_.end());
  differ_.erase(std::unique(differ_.begin(), differ_.end()), differ_.end());
  warn_of_differences(differ_, merged.warnings);
  merged.tree = std::move(tree_);
  return merged;
}

}  // namespace tessera
