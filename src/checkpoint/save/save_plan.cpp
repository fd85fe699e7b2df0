#include "checkpoint/save/save_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/parallel.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/read/tail.h"
#include "format/torch/torch_file.h"
#include "layout/boxes.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::uint64_t length_of(const Value& tree) {
  return torch_file::Writer(tree, "archive").size();
}

}  // namespace

FileRules file_rules(const SaveOptions& options) {
  require_threads(options.threads);
  const int level = options.compression_level;
  if (options.compression != Compression::none &&
      (level < kLowestZstdLevel || level > kHighestZstdLevel)) {
    throw Error(ErrorCode::invalid_argument, "compression level " + std::to_string(level) +
                                                 ", expected " + std::to_string(kLowestZstdLevel) +
                                                 " to " + std::to_string(kHighestZstdLevel));
  }
  return {options.threads, options.one_file_an_item, options.compression, level};
}

std::uint64_t item_length(const Value& value) {
  return length_of(value);
}

std::uint64_t ItemLengths::of(DType dtype, const Shape& sizes) {
  if (last_length_ != 0 && last_.first == dtype && last_.second == sizes) return last_length_;
  std::pair<DType, Shape> key(dtype, sizes);
  auto found = known_.find(key);
  if (found == known_.end()) {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.shape = sizes;
    found = known_.emplace(key, length_of(Value(std::move(tensor)))).first;
  }
  last_ = std::move(key);
  last_length_ = found->second;
  return last_length_;
}

FilePlan::FilePlan(int first, int ranks, FileRules rules) : first_(first), rules_(rules) {
  const auto count = static_cast<std::size_t>(ranks);
  if (rules.one_an_item) {
    own_.resize(count);
  } else {
    all_.resize(count * static_cast<std::size_t>(rules.most));
  }
}

std::size_t FilePlan::first_file_of(int rank) const {
  return index_of(rank) * static_cast<std::size_t>(rules_.most);
}

int FilePlan::files_of(int rank) const {
  return rules_.one_an_item ? static_cast<int>(own_[index_of(rank)].size()) : rules_.most;
}

ItemPlace FilePlan::place(int rank, std::uint64_t length, std::uint64_t bytes) {
  if (rules_.one_an_item) {
    const ItemPlace place{files_of(rank), 0, length, 0};
    own_[index_of(rank)].push_back(length);
    return place;
  }
  const auto begin = all_.begin() + static_cast<std::ptrdiff_t>(first_file_of(rank));
  const auto least = std::ranges::min_element(begin, begin + rules_.most, {}, &File::load);
  const ItemPlace place{static_cast<int>(least - begin), least->end, length, least->items};
  least->load += std::max<std::uint64_t>(bytes, 1);
  least->end += length;
  ++least->items;
  return place;
}

std::uint64_t FilePlan::size_of(int rank, int file) const {
  if (items_of(rank, file) == 0) return 0;
  if (rules_.one_an_item) {
    const std::uint64_t length = own_[index_of(rank)][static_cast<std::size_t>(file)];
    return length + tail_size(length, 1);
  }
  const File& planned = all_[first_file_of(rank) + static_cast<std::size_t>(file)];
  return planned.end + tail_size(planned.end, planned.items);
}

std::uint64_t FilePlan::items_of(int rank, int file) const {
  if (file < 0 || file >= files_of(rank)) return 0;
  return rules_.one_an_item ? 1 : all_[first_file_of(rank) + static_cast<std::size_t>(file)].items;
}

namespace {

// Indices of the leaves that `picks`, by name.
template <typename Picks>
std::vector<std::size_t> by_name(const std::vector<PlannedLeaf>& leaves, const Picks& picks) {
  std::vector<std::size_t> picked;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (picks(leaves[i])) picked.push_back(i);
  }
  std::ranges::sort(picked, {},
                    [&](std::size_t i) -> const std::string& { return leaves[i].name; });
  return picked;
}

bool is_value(const PlannedLeaf& leaf) {
  return !leaf.is_tensor;
}

bool is_told_tensor(const PlannedLeaf& leaf) {
  return leaf.is_tensor && !leaf.placement;
}

// Lays out what one rank writes.
class OwnLayout {
 public:
  OwnLayout(const PlanRules& rules, const OwnLeaves& own, const Choices& choices)
      : rules_(rules), own_(own), choices_(choices), files_(own.rank, 1, rules.files) {}

  OwnPlan run() {
    for (const std::size_t leaf : by_name(own_.leaves, is_value)) value(leaf);
    PlacedWalk walk(rules_.ranks, rules_.writers());
    for (std::size_t leaf = 0; leaf < own_.leaves.size(); ++leaf) {
      if (is_placed(leaf)) placed(walk, leaf);
    }
    const auto is_told = [this](const PlannedLeaf& leaf) {
      return leaf.is_tensor && (rules_.everything_told || !leaf.placement);
    };
    for (const std::size_t leaf : by_name(own_.leaves, is_told)) told(leaf);
    list_files(plan_, files_.files_of(own_.rank));
    return std::move(plan_);
  }

 private:
  [[nodiscard]] bool is_placed(std::size_t leaf) const {
    return !rules_.everything_told && own_.leaves[leaf].is_tensor && own_.leaves[leaf].placement;
  }

  void value(std::size_t leaf) {
    OwnItem item{.leaf = leaf, .key = key_of(own_.leaves[leaf].name, {}), .holders = rules_.ranks};
    item.is_written = own_.rank == 0;
    if (rules_.everything_told) choose(item);
    if (item.is_written) item.place = files_.place(own_.rank, own_.value_length(leaf), 0);
    plan_.items.push_back(std::move(item));
  }

  void placed(PlacedWalk& walk, std::size_t leaf) {
    const PlannedLeaf& planned = own_.leaves[leaf];
    const auto part = walk.part_of(planned, part_of_rank(*planned.placement, own_.rank));
    if (!part) return;
    for (const Box& box : part->boxes) {
      OwnItem item{.leaf = leaf,
                   .chunk = chunk_at(leaf, box),
                   .key = key_of(planned.name, box.offsets),
                   .holders = part->holders};
      item.is_written = part->writer == own_.rank;
      add(std::move(item));
    }
  }

  // A tensor without elements has no chunk with a storage.
  [[nodiscard]] HeldChunk chunk_at(std::size_t leaf, const Box& box) const {
    const std::vector<HeldChunk>& held = own_.chunks[leaf];
    const auto found = std::ranges::find(held, box, &HeldChunk::box);
    return found == held.end() ? HeldChunk{box, 0} : *found;
  }

  void told(std::size_t leaf) {
    const std::vector<HeldChunk>& held = own_.chunks[leaf];
    for (std::size_t i = 0; i < held.size(); ++i) {
      if (i > 0 && held[i].box == held[i - 1].box) continue;
      OwnItem item{.leaf = leaf,
                   .chunk = held[i],
                   .key = key_of(own_.leaves[leaf].name, held[i].box.offsets),
                   .is_written = true};
      choose(item);
      add(std::move(item));
    }
  }

  // An item without a choice is held by nobody else: this rank writes it.
  void choose(OwnItem& item) const {
    const auto choice = choices_.find(item.key);
    item.is_written = choice == choices_.end() || choice->second.writer == own_.rank;
    item.holders = choice == choices_.end() ? 1 : choice->second.holders;
  }

  void add(OwnItem item) {
    const PlannedLeaf& leaf = own_.leaves[item.leaf];
    const Shape& sizes = item.chunk.box.sizes;
    if (item.is_written) {
      item.place =
          files_.place(own_.rank, lengths_.of(leaf.dtype, sizes), byte_size(leaf.dtype, sizes));
    }
    plan_.items.push_back(std::move(item));
  }

  const PlanRules& rules_;
  const OwnLeaves& own_;
  const Choices& choices_;
  FilePlan files_;
  ItemLengths lengths_;
  OwnPlan plan_;
};

}  // namespace

OwnPlan own_plan(const PlanRules& rules, const OwnLeaves& own, const Choices& choices) {
  return OwnLayout(rules, own, choices).run();
}

void list_files(OwnPlan& plan, int files) {
  plan.files.assign(static_cast<std::size_t>(files), {});
  for (std::size_t i = 0; i < plan.items.size(); ++i) {
    const OwnItem& item = plan.items[i];
    if (item.is_written) plan.files[static_cast<std::size_t>(item.place.file)].push_back(i);
  }
}

SavePlan::SavePlan(const PlanRules& rules, ToldLeaves told,
                   const std::function<std::uint64_t(std::size_t leaf)>& value_length)
    : rules_(rules),
      told_(std::move(told)),
      places_(told_.leaves().size()),
      after_values_(0, rules.ranks, rules.files),
      files_(0, rules.ranks, rules.files) {
  place_values(value_length);
  after_values_ = files_;
  place_told();
}

void SavePlan::choose(const std::string& name, const Shape& offsets, int writer,
                      std::size_t holders) {
  if (holders > 1) choices_.push_back({key_of(name, offsets), writer, static_cast<int>(holders)});
}

void SavePlan::place_values(const std::function<std::uint64_t(std::size_t leaf)>& value_length) {
  for (const std::size_t leaf : by_name(leaves(), is_value)) {
    Told made;
    std::uint64_t length = 0;
    if (rules_.everything_told) {
      const auto& holders = told_.holders_of_value(leaf);
      made.rank = holders.front().rank;
      length = holders.front().value.length;
      choose(leaves()[leaf].name, {}, made.rank, holders.size());
    } else {
      length = value_length(leaf);
    }
    made.place = files_.place(made.rank, length, 0);
    places_[leaf].push_back(made);
  }
}

void SavePlan::place_told() {
  PlacedWalk walk(rules_.ranks, rules_.writers());
  ItemLengths lengths;
  for (const PlannedLeaf& leaf : leaves()) {
    if (!leaf.placement) continue;
    walk.leaf(leaf, [&](int, const PlacedPart& part) {
      for (const Box& box : part.boxes) {
        files_.place(part.writer, lengths.of(leaf.dtype, box.sizes),
                     byte_size(leaf.dtype, box.sizes));
      }
    });
  }
  for (const std::size_t index : by_name(leaves(), is_told_tensor)) {
    const PlannedLeaf& leaf = leaves()[index];
    told_.chunks(index, [&](const Box& box, std::span<const int> holders) {
      const std::uint64_t bytes = byte_size(leaf.dtype, box.sizes);
      const int writer = walk.writer_of(leaf.name, holders);
      walk.add_load(writer, bytes);
      choose(leaf.name, box.offsets, writer, holders.size());
      places_[index].push_back(
          {writer, files_.place(writer, lengths.of(leaf.dtype, box.sizes), bytes)});
    });
  }
}

void SavePlan::boxes(std::size_t leaf, const VisitBox& visit) const {
  const PlannedLeaf& planned = leaves()[leaf];
  if (!planned.placement) {
    told_.chunks(leaf, [&](const Box& box, std::span<const int>) { visit(box); });
    return;
  }
  for (int part = 0; part < planned.placement->parts; ++part) {
    for (const Box& box : boxes_of_part(*planned.placement, planned.shape, part)) visit(box);
  }
}

SavePlan::Items::Items(const SavePlan& plan)
    : plan_(plan), walk_(plan.rules_.ranks, plan.rules_.writers()), files_(plan.after_values_) {}

void SavePlan::Items::leaf(const Visit& visit) {
  const std::size_t index = next_++;
  const PlannedLeaf& leaf = plan_.leaves()[index];
  const std::vector<Told>& told = plan_.places_[index];
  if (!leaf.is_tensor) {
    visit(nullptr, told.front().rank, told.front().place);
    return;
  }
  if (!leaf.placement) {
    std::size_t at = 0;
    plan_.told_.chunks(index, [&](const Box& box, std::span<const int>) {
      visit(&box, told[at].rank, told[at].place);
      ++at;
    });
    return;
  }
  walk_.leaf(leaf, [&](int, const PlacedPart& part) {
    for (const Box& box : part.boxes) {
      visit(&box, part.writer,
            files_.place(part.writer, lengths_.of(leaf.dtype, box.sizes),
                         byte_size(leaf.dtype, box.sizes)));
    }
  });
}

}  // namespace tessera
