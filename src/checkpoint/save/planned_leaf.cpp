#include "checkpoint/save/planned_leaf.h"

#include <algorithm>

#include "checkpoint/dcp/catalog.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::size_t kTold = 100;
constexpr std::size_t kLongestLeafKey = 200;  // bytes

}  // namespace

void KeyErrors::add(const Error& error) {
  ++count_;
  if (told_.size() < kTold) told_.push_back(error);
  one_code_ = one_code_ && error.code() == told_.front().code();
}

void KeyErrors::require_none() const {
  if (count_ == 0) return;
  if (count_ == 1) throw Error(told_.front());
  std::string text = std::to_string(count_) + " keys do not fit: ";
  for (const Error& error : told_) {
    if (&error != &told_.front()) text += "; ";
    text += "'" + printable(error.key(), kLongestLeafKey) + "': " + error.message();
  }
  if (count_ > told_.size()) text += "; and " + std::to_string(count_ - told_.size()) + " more";
  throw Error(one_code_ ? told_.front().code() : ErrorCode::mismatch, std::move(text))
      .at_key(told_.front().key());
}

namespace {

bool holds_part(const std::vector<HeldChunk>& held, const Placement& placement, const Shape& shape,
                int rank) {
  std::vector<Box> boxes = boxes_of_part(placement, shape, part_of_rank(placement, rank));
  std::ranges::sort(boxes, begins_before);
  return std::ranges::equal(held, boxes, {}, &HeldChunk::box);
}

std::optional<Placement> placement_of(const Tensor& tensor, int rank, int ranks) {
  // Without elements there is nothing to divide.
  if (numel(tensor.shape) == 0) return Placement{};
  if (tensor.sharded && !tensor.placement) return std::nullopt;
  const Placement placement = tensor.placement.value_or(Placement{});
  if (!fits(placement, tensor.shape, ranks)) return std::nullopt;
  if (!holds_part(held_chunks(tensor), placement, tensor.shape, rank)) return std::nullopt;
  return placement;
}

}  // namespace

bool begins_before(const Box& a, const Box& b) {
  return a.offsets < b.offsets;
}

std::vector<HeldChunk> held_chunks(const Tensor& tensor) {
  std::vector<HeldChunk> held;
  if (numel(tensor.shape) == 0) return {{whole(tensor.shape), 0}};
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    const Piece& piece = tensor.pieces[p];
    if (numel(piece.slice) == 0 || !piece.storage) continue;
    const Box* box = std::get_if<Box>(&piece.slice);
    if (box == nullptr) {
      throw Error(ErrorCode::unsupported,
                  "a flat range cannot be a chunk of a DCP checkpoint: give boxes");
    }
    require_inside(*box, tensor.shape);
    held.push_back({*box, p});
  }
  std::ranges::stable_sort(held, begins_before, &HeldChunk::box);
  const auto same = [](const HeldChunk& a, const HeldChunk& b) { return a.box == b.box; };
  held.erase(std::unique(held.begin(), held.end(), same), held.end());
  std::vector<Slice> slices;
  if (held.size() > 1)
    for (const HeldChunk& chunk : held) slices.emplace_back(chunk.box);
  require_apart(tensor.shape, slices);
  return held;
}

PlannedLeaf planned(const Leaf& leaf, int rank, int ranks) {
  PlannedLeaf made;
  made.name = leaf.name;
  made.path = leaf.path;
  made.is_tensor = leaf.value.is(Value::Kind::tensor);
  if (!made.is_tensor) return made;
  const Tensor& tensor = leaf.value.as_tensor();
  made.dtype = tensor.dtype;
  made.shape = tensor.shape;
  made.requires_grad = tensor.requires_grad;
  try {
    made.placement = placement_of(tensor, rank, ranks);
  } catch (Error& error) {
    throw error.at_key(leaf.name);
  }
  return made;
}

std::string kept_name(const std::string& name, int rank) {
  return name + ".rank" + std::to_string(rank);
}

void write_leaf(MessageWriter& message, const PlannedLeaf& leaf) {
  write_path(message, leaf.path);
  message.value(leaf);
}

PlannedLeaf read_leaf(MessageReader& message) {
  Path path = read_path(message);
  auto leaf = message.value<PlannedLeaf>();
  leaf.path = std::move(path);
  return leaf;
}

namespace {

int holders_of(const Placement& placement, int part, int ranks) {
  const int cycle = placement.parts * placement.stride;
  const int first = part * placement.stride;
  return ranks / cycle * placement.stride + std::clamp(ranks % cycle - first, 0, placement.stride);
}

// Visits the ranks that hold the part, ascending.
template <typename Visit>
void for_each_holder(const Placement& placement, int part, int ranks, const Visit& visit) {
  const int cycle = placement.parts * placement.stride;
  for (int base = part * placement.stride; base < ranks; base += cycle) {
    for (int rank = base; rank < std::min(base + placement.stride, ranks); ++rank) visit(rank);
  }
}

std::vector<int> holders_of_part(const Placement& placement, int part, int ranks) {
  std::vector<int> holders;
  for_each_holder(placement, part, ranks, [&](int rank) { holders.push_back(rank); });
  return holders;
}

std::uint64_t bytes_of_part(const PlannedLeaf& leaf, int part) {
  const std::int64_t elements = elements_of_part(*leaf.placement, leaf.shape, part);
  return static_cast<std::uint64_t>(elements) * size_of(leaf.dtype);
}

}  // namespace

void PlacedWalk::leaf(const PlannedLeaf& leaf, const Visit& visit) {
  const Placement& placement = *leaf.placement;
  PlacedPart made;
  for (int part = 0; part < placement.parts; ++part) {
    made.boxes = boxes_of_part(placement, leaf.shape, part);
    if (made.boxes.empty()) continue;
    made.holders = holders_of(placement, part, ranks_);
    made.writer = writer_of_part(leaf, part, made.holders);
    add_load(made.writer, bytes_of_part(leaf, part));
    visit(part, made);
  }
}

std::optional<PlacedPart> PlacedWalk::part_of(const PlannedLeaf& leaf, int part) {
  const Placement& placement = *leaf.placement;
  PlacedPart own{.boxes = boxes_of_part(placement, leaf.shape, part),
                 .holders = holders_of(placement, part, ranks_)};
  if (placement.parts == ranks_ || !weighs()) {  // who writes a part depends on no other
    if (!own.boxes.empty()) own.writer = writer_of_part(leaf, part, own.holders);
    if (weighs()) uncounted_.push_back(&leaf);
  } else {
    for (int other = 0; other < placement.parts; ++other) {
      const std::uint64_t bytes = bytes_of_part(leaf, other);
      if (bytes == 0 && other != part) continue;
      const int writer = writer_of_part(leaf, other, holders_of(placement, other, ranks_));
      add_load(writer, bytes);
      if (other == part) own.writer = writer;
    }
  }
  if (own.boxes.empty()) return std::nullopt;
  return own;
}

void PlacedWalk::add_load(int rank, std::uint64_t bytes) {
  if (!weighs()) return;
  loads_.resize(static_cast<std::size_t>(ranks_));
  loads_[static_cast<std::size_t>(rank)] += bytes;
}

// Parts of these leaves have one holder each: part r is rank r's.
void PlacedWalk::settle() {
  loads_.resize(static_cast<std::size_t>(ranks_));
  for (const PlannedLeaf* leaf : uncounted_) {
    for (int rank = 0; rank < ranks_; ++rank) add_load(rank, bytes_of_part(*leaf, rank));
  }
  uncounted_.clear();
}

int PlacedWalk::writer_of_part(const PlannedLeaf& leaf, int part, int holders) {
  const Placement& placement = *leaf.placement;
  int writer = part * placement.stride;
  if (holders == 1) return writer;
  if (rules_.function) return chosen(leaf.name, holders_of_part(placement, part, ranks_));
  if (rules_.replicas == ReplicaWriter::lowest_rank) return writer;
  settle();
  for_each_holder(placement, part, ranks_, [&](int rank) {
    if (load_of(rank) < load_of(writer)) writer = rank;
  });
  return writer;
}

int PlacedWalk::chosen(const std::string& key, std::span<const int> holders) const {
  const int writer = rules_.function(key, holders);
  if (std::ranges::binary_search(holders, writer)) return writer;
  throw Error(ErrorCode::invalid_argument,
              "rank " + std::to_string(writer) +
                  " is to write a part that it does not hold: " + std::to_string(holders.size()) +
                  " ranks do, the first is rank " + std::to_string(holders.front()))
      .at_key(key);
}

int PlacedWalk::writer_of(const std::string& key, std::span<const int> holders) {
  if (holders.size() == 1) return holders.front();
  if (rules_.function) return chosen(key, holders);
  if (rules_.replicas == ReplicaWriter::lowest_rank) return holders.front();
  settle();
  return *std::ranges::min_element(holders, {}, [this](int rank) { return load_of(rank); });
}

}  // namespace tessera
