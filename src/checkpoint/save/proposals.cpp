#include "checkpoint/save/proposals.h"

#include <algorithm>
#include <compare>
#include <numeric>
#include <utility>

#include "base/digest.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "tessera/error.h"

namespace tessera {
namespace {

void write_chunks(MessageWriter& message, const std::vector<HeldChunk>& chunks) {
  message.count(chunks.size());
  for (const HeldChunk& chunk : chunks) {
    for (const std::int64_t offset : chunk.box.offsets)
      message.count(static_cast<std::uint64_t>(offset));
    for (const std::int64_t size : chunk.box.sizes) message.count(static_cast<std::uint64_t>(size));
  }
}

bool has_to_be_told(const PlannedLeaf& leaf) {
  return leaf.is_tensor && !leaf.placement;
}

std::string describe(const PlannedLeaf& leaf) {
  if (!leaf.is_tensor) return "a value";
  return std::string(to_string(leaf.dtype)) + " " + to_string(leaf.shape);
}

bool same_kind(const PlannedLeaf& a, const PlannedLeaf& b) {
  return a.is_tensor == b.is_tensor && (!a.is_tensor || (a.dtype == b.dtype && a.shape == b.shape));
}

}  // namespace

std::uint64_t key_of(const std::string& name, const Shape& offsets) {
  RunningDigest digest;
  digest.add(std::as_bytes(std::span(name.data(), name.size() + 1)));  // with the zero at its end
  digest.add(std::as_bytes(std::span(offsets)));
  return digest.value();
}

Bytes encode_proposal(const Proposal& proposal) {
  MessageWriter message;
  message.number(static_cast<std::int32_t>(proposal.rank));
  std::vector<std::size_t> told;
  for (std::size_t i = 0; i < proposal.leaves.size(); ++i) {
    if (proposal.everything || has_to_be_told(proposal.leaves[i])) told.push_back(i);
  }
  message.count(told.size());
  for (const std::size_t i : told) {
    const PlannedLeaf& leaf = proposal.leaves[i];
    if (proposal.everything) {
      write_leaf(message, leaf);
    } else {
      message.count(i);
    }
    if (leaf.is_tensor) {
      write_chunks(message, proposal.tensors[i]);
    } else {
      message.number(proposal.values[i].digest).number(proposal.values[i].length);
    }
  }
  return message.take();
}

Choices choices_of(const Bytes& told) {
  Choices choices;
  MessageReader message(told);
  for (auto left = message.count(); left > 0; --left) {
    const auto choice = message.value<WriterChoice>();
    choices.emplace(choice.key, choice);
  }
  return choices;
}

ToldLeaves::ToldLeaves(std::vector<PlannedLeaf> leaves, bool everything)
    : leaves_(std::move(leaves)),
      everything_(everything),
      columns_(leaves_.size()),
      values_(leaves_.size()) {}

void ToldLeaves::add(const Bytes& proposals) {
  for (MessageReader message(proposals); !message.at_end();) add_proposal(message);
}

void ToldLeaves::add_proposal(MessageReader& message) {
  const int rank = message.number<std::int32_t>();
  ++ranks_;
  for (auto count = message.count(); count > 0; --count) {
    const Target target = target_of(message, rank);
    if (target.is_tensor) {
      read_chunks(message, target, rank);
    } else {
      read_value(message, target, rank);
    }
  }
}

ToldLeaves::Target ToldLeaves::target_of(MessageReader& message, int rank) {
  if (!everything_) {
    const auto leaf = static_cast<std::size_t>(message.count());
    return {leaf, true, leaves_.at(leaf).shape.size(), true};
  }
  PlannedLeaf told = read_leaf(message);
  told.placement.reset();
  if (told.is_kept) count_kept(told, rank);
  const auto [known, is_new] = by_name_.emplace(told.name, leaves_.size());
  Target target{known->second, told.is_tensor, told.shape.size(), true};
  if (is_new) {
    leaves_.push_back(std::move(told));
    columns_.emplace_back();
    values_.emplace_back();
    tellers_.emplace_back().add(rank);
    return target;
  }
  tellers_[known->second].add(rank);
  const PlannedLeaf& first = leaves_[known->second];
  if (first.is_kept || told.is_kept) {
    errors_.add(Error(ErrorCode::conflict,
                      "a rank keeps its own value under this name, which another leaf has")
                    .at_key(told.name));
    target.fits = false;
    return target;
  }
  target.fits = same_kind(first, told);
  if (!target.fits) {
    errors_.add(Error(ErrorCode::mismatch, "lower ranks have " + describe(first) + ", rank " +
                                               std::to_string(rank) + " has " + describe(told))
                    .at_key(told.name));
  }
  return target;
}

// The rank has the key whose value it keeps: that of a lower rank was told before.
void ToldLeaves::count_kept(const PlannedLeaf& kept, int rank) {
  const std::size_t length = kept.name.size() - kept_name("", rank).size();
  const auto original = by_name_.find(kept.name.substr(0, length));
  if (original != by_name_.end()) tellers_[original->second].add(rank);
}

void ToldLeaves::read_chunks(MessageReader& message, const Target& target, int rank) {
  Column passed_over;
  Column& column = target.fits ? columns_[target.leaf] : passed_over;
  for (auto count = message.count(); count > 0; --count) {
    for (std::size_t i = 0; i < 2 * target.dimensions; ++i)
      column.boxes.push_back(static_cast<std::int64_t>(message.count()));
    column.ranks.push_back(rank);
  }
}

void ToldLeaves::read_value(MessageReader& message, const Target& target, int rank) {
  const auto digest = message.number<std::uint64_t>();
  const auto length = message.number<std::uint64_t>();
  if (target.fits) values_[target.leaf].push_back({rank, {digest, length}});
}

void ToldLeaves::require_same_keys() {
  for (std::size_t leaf = 0; leaf < tellers_.size(); ++leaf) {
    const auto [count, lacking] = tellers_[leaf];
    if (count == ranks_ || leaves_[leaf].is_kept) continue;
    errors_.add(Error(ErrorCode::mismatch, std::to_string(ranks_ - count) + " of " +
                                               std::to_string(ranks_) +
                                               " ranks do not have it, the first is rank " +
                                               std::to_string(lacking < 0 ? count : lacking))
                    .at_key(leaves_[leaf].name));
  }
}

void ToldLeaves::finish() {
  for (std::size_t leaf = 0; leaf < leaves_.size(); ++leaf) {
    if (!is_told(leaf)) continue;
    try {
      sort(leaf);
      require_covered(leaf);
    } catch (Error& error) {
      errors_.add(error.at_key(leaves_[leaf].name));
    }
  }
  errors_.require_none();
}

bool ToldLeaves::is_told(std::size_t leaf) const {
  return has_to_be_told(leaves_[leaf]);
}

ToldLeaves::Numbers ToldLeaves::row(std::size_t leaf, std::size_t index) const {
  const std::size_t width = 2 * leaves_[leaf].shape.size();
  return Numbers(columns_[leaf].boxes).subspan(index * width, width);
}

// Ranks tell in their order, and most tensors are cut so that chunks are in order then.
bool ToldLeaves::is_sorted(std::size_t leaf) const {
  for (std::size_t i = 1; i < columns_[leaf].ranks.size(); ++i) {
    const Numbers before = row(leaf, i - 1), here = row(leaf, i);
    if (!std::ranges::lexicographical_compare(before, here)) return false;
  }
  return true;
}

// Chunks are sorted by where they begin; the holders of one by rank, each once.
void ToldLeaves::sort(std::size_t leaf) {
  if (is_sorted(leaf)) return;
  Column& column = columns_[leaf];
  std::vector<std::size_t> order(column.ranks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) {
    const Numbers left = row(leaf, a), right = row(leaf, b);
    const auto by_box = std::lexicographical_compare_three_way(left.begin(), left.end(),
                                                               right.begin(), right.end());
    return std::is_neq(by_box) ? std::is_lt(by_box) : column.ranks[a] < column.ranks[b];
  });
  Column sorted;
  sorted.boxes.reserve(column.boxes.size());
  sorted.ranks.reserve(column.ranks.size());
  for (const std::size_t index : order) {
    const Numbers here = row(leaf, index);
    const bool twice = !sorted.ranks.empty() && sorted.ranks.back() == column.ranks[index] &&
                       std::ranges::equal(here, Numbers(sorted.boxes).last(here.size()));
    if (twice) continue;
    sorted.boxes.insert(sorted.boxes.end(), here.begin(), here.end());
    sorted.ranks.push_back(column.ranks[index]);
  }
  column = std::move(sorted);
}

void ToldLeaves::require_covered(std::size_t leaf) const {
  const Shape& shape = leaves_[leaf].shape;
  const auto here = [&](std::size_t index) { return row(leaf, index); };
  if (is_row_of_slices(shape, columns_[leaf].ranks.size(), here)) return;
  std::vector<Slice> slices;
  chunks(leaf, [&](const Box& box, std::span<const int>) {
    if (!slices.empty() && std::get<Box>(slices.back()).offsets == box.offsets) {
      throw Error(ErrorCode::conflict,
                  "two chunks begin at " + to_string(box.offsets) + " with different sizes");
    }
    slices.emplace_back(box);
  });
  require_covered_once(shape, slices);
}

void ToldLeaves::chunks(std::size_t leaf, const VisitChunk& visit) const {
  const std::span<const int> ranks(columns_[leaf].ranks);
  const std::size_t dimensions = leaves_[leaf].shape.size();
  Box box;
  for (std::size_t begin = 0, end = 0; begin < ranks.size(); begin = end) {
    const Numbers here = row(leaf, begin);
    for (end = begin + 1; end < ranks.size() && std::ranges::equal(here, row(leaf, end)); ++end) {
    }
    box.offsets.assign(here.begin(), here.begin() + static_cast<std::ptrdiff_t>(dimensions));
    box.sizes.assign(here.begin() + static_cast<std::ptrdiff_t>(dimensions), here.end());
    visit(box, ranks.subspan(begin, end - begin));
  }
}

}  // namespace tessera
