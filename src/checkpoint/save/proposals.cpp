#include "checkpoint/save/proposals.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/digest.h"
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

Bytes encode_choices(const std::vector<Choice>& choices) {
  MessageWriter message;
  for (const Choice& choice : choices) {
    message.number(choice.key);
    message.number(static_cast<std::int32_t>(choice.writer));
    message.number(static_cast<std::int32_t>(choice.holders));
  }
  return message.take();
}

Choices decode_choices(const Bytes& bytes) {
  Choices choices;
  for (MessageReader message(bytes); !message.at_end();) {
    Choice choice;
    choice.key = message.number<std::uint64_t>();
    choice.writer = message.number<std::int32_t>();
    choice.holders = message.number<std::int32_t>();
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
  const auto [known, is_new] = by_name_.emplace(told.name, leaves_.size());
  Target target{known->second, told.is_tensor, told.shape.size(), true};
  if (is_new) {
    leaves_.push_back(std::move(told));
    columns_.emplace_back();
    values_.emplace_back();
    return target;
  }
  const PlannedLeaf& first = leaves_[known->second];
  target.fits = same_kind(first, told);
  if (!target.fits) {
    errors_.add(Error(ErrorCode::mismatch, "lower ranks have " + describe(first) + ", rank " +
                                               std::to_string(rank) + " has " + describe(told))
                    .at_key(told.name));
  }
  return target;
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

Box ToldLeaves::box_of(std::size_t leaf, std::size_t row) const {
  const auto dimensions = static_cast<std::ptrdiff_t>(leaves_[leaf].shape.size());
  const auto begin =
      columns_[leaf].boxes.begin() + static_cast<std::ptrdiff_t>(row) * 2 * dimensions;
  return {Shape(begin, begin + dimensions), Shape(begin + dimensions, begin + 2 * dimensions)};
}

// By where chunks begin; the holders of one by rank, each once.
void ToldLeaves::sort(std::size_t leaf) {
  Column& column = columns_[leaf];
  const std::size_t width = 2 * leaves_[leaf].shape.size();
  std::vector<std::size_t> order(column.ranks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto row = [&](std::size_t index) {
    return std::span(column.boxes).subspan(index * width, width);
  };
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) {
    const auto by_box = std::lexicographical_compare_three_way(row(a).begin(), row(a).end(),
                                                               row(b).begin(), row(b).end());
    return by_box != 0 ? by_box < 0 : column.ranks[a] < column.ranks[b];
  });
  Column sorted;
  sorted.boxes.reserve(column.boxes.size());
  sorted.ranks.reserve(column.ranks.size());
  for (const std::size_t index : order) {
    const bool twice = !sorted.ranks.empty() && sorted.ranks.back() == column.ranks[index] &&
                       std::ranges::equal(row(index), std::span(sorted.boxes).last(width));
    if (twice) continue;
    sorted.boxes.insert(sorted.boxes.end(), row(index).begin(), row(index).end());
    sorted.ranks.push_back(column.ranks[index]);
  }
  column = std::move(sorted);
}

void ToldLeaves::require_covered(std::size_t leaf) const {
  std::vector<Slice> slices;
  for (ToldChunk& chunk : chunks(leaf)) {
    if (!slices.empty() && std::get<Box>(slices.back()).offsets == chunk.box.offsets) {
      throw Error(ErrorCode::conflict,
                  "two chunks begin at " + to_string(chunk.box.offsets) + " with different sizes");
    }
    slices.emplace_back(std::move(chunk.box));
  }
  require_covered_once(leaves_[leaf].shape, slices);
}

std::vector<ToldChunk> ToldLeaves::chunks(std::size_t leaf) const {
  std::vector<ToldChunk> chunks;
  const std::vector<int>& ranks = columns_[leaf].ranks;
  for (std::size_t row = 0; row < ranks.size(); ++row) {
    Box box = box_of(leaf, row);
    if (chunks.empty() || chunks.back().box != box) chunks.push_back({std::move(box), {}});
    chunks.back().holders.push_back(ranks[row]);
  }
  return chunks;
}

}  // namespace tessera
