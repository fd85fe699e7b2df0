#include "checkpoint/save/save_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <unordered_map>

#include "base/checked.h"
#include "layout/plan.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// The place of a replica: a rank and an index into its proposal.
struct Candidate {
  std::size_t rank = 0;
  std::size_t item = 0;
};

// All proposals of one chunk, or of one value.
struct Proposals {
  std::vector<Candidate> candidates;  // ascending by rank
  std::uint64_t bytes = 0;
};

[[noreturn]] void refuse_disagreement(const WriteItem& a, const WriteItem& b, std::size_t rank) {
  const auto describe = [](const WriteItem& item) {
    return item.is_tensor ? std::string(to_string(item.dtype)) + " " + to_string(item.shape)
                          : std::string("a value");
  };
  throw Error(ErrorCode::mismatch, "rank 0's side has " + describe(a) + ", rank " +
                                       std::to_string(rank) + " has " + describe(b))
      .at_key(a.name);
}

bool same_kind(const WriteItem& a, const WriteItem& b) {
  return a.is_tensor == b.is_tensor && (!a.is_tensor || (a.dtype == b.dtype && a.shape == b.shape));
}

// What all ranks propose, by what it is about.
struct Collected {
  std::map<std::pair<std::string, Shape>, Proposals> targets;  // by name and where a chunk begins
  std::unordered_map<std::string, const WriteItem*> first;     // by name
  std::map<std::string, std::vector<Slice>> slices;            // by name

  void add(const std::vector<std::vector<WriteItem>>& proposals, const Candidate& candidate) {
    const WriteItem& item = proposals[candidate.rank][candidate.item];
    const WriteItem& reference = *first.emplace(item.name, &item).first->second;
    if (!same_kind(reference, item)) refuse_disagreement(reference, item, candidate.rank);
    if (!item.held) {
      slices.try_emplace(item.name);
      return;
    }
    Proposals& target = targets[{item.name, item.box.offsets}];
    if (item.is_tensor) add_chunk(proposals, item, target);
    const bool twice =
        !target.candidates.empty() && target.candidates.back().rank == candidate.rank;
    if (!twice) target.candidates.push_back(candidate);
  }

  void add_chunk(const std::vector<std::vector<WriteItem>>& proposals, const WriteItem& item,
                 Proposals& target) {
    target.bytes = byte_size(item.dtype, item.box.sizes);
    if (target.candidates.empty()) {
      slices[item.name].push_back(item.box);
      return;
    }
    const Candidate& other = target.candidates.front();
    if (proposals[other.rank][other.item].box != item.box) {
      throw Error(ErrorCode::conflict,
                  "two chunks begin at " + to_string(item.box.offsets) + " with different sizes")
          .at_key(item.name);
    }
  }

  void require_covered() const {
    for (const auto& [name, boxes] : slices) {
      try {
        require_covered_once(first.at(name)->shape, boxes);
      } catch (Error& error) {
        throw error.at_key(name);
      }
    }
  }
};

// The rank with the fewest bytes so far; of a value the lowest one that has it.
Candidate writer_of(const Proposals& target, const std::vector<std::uint64_t>& load) {
  if (target.bytes == 0) return target.candidates.front();
  return *std::ranges::min_element(target.candidates, {},
                                   [&](const Candidate& one) { return load[one.rank]; });
}

void sort_each(std::vector<std::vector<std::size_t>>& lists) {
  for (auto& items : lists) std::sort(items.begin(), items.end());
}

SavePlan assign(const std::map<std::pair<std::string, Shape>, Proposals>& targets,
                std::size_t ranks) {
  SavePlan plan;
  plan.assignment.resize(ranks);
  plan.copied.resize(ranks);
  std::vector<std::uint64_t> load(ranks, 0);
  for (const auto& [key, target] : targets) {
    const Candidate chosen = writer_of(target, load);
    load[chosen.rank] += target.bytes;
    plan.assignment[chosen.rank].push_back(chosen.item);
    if (target.bytes == 0 || target.candidates.size() == 1) continue;
    for (const Candidate& candidate : target.candidates)
      plan.copied[candidate.rank].push_back(candidate.item);
  }
  sort_each(plan.assignment);
  sort_each(plan.copied);
  return plan;
}

// The chunks of a tensor that a rank holds; `item` says all but which.
void add_chunks(const Tensor& tensor, WriteItem item, std::vector<WriteItem>& items) {
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    if (!tensor.pieces[p].storage && numel(tensor.pieces[p].slice) > 0) continue;
    const Box* box = std::get_if<Box>(&tensor.pieces[p].slice);
    if (box == nullptr) {
      throw Error(ErrorCode::unsupported,
                  "a flat range cannot be a chunk of a DCP checkpoint: give boxes")
          .at_key(item.name);
    }
    require_inside(*box, tensor.shape);
    if (numel(*box) == 0 && numel(tensor.shape) > 0) continue;
    item.box = *box;
    item.piece = p;
    items.push_back(item);
  }
}

dcp::Entry entry_of(const WriteItem& item, const std::shared_ptr<dcp::ItemTexts>& texts) {
  dcp::Entry entry;
  entry.name = item.name;
  entry.path = item.path;
  entry.is_tensor = item.is_tensor;
  entry.dtype = item.dtype;
  entry.shape = item.shape;
  entry.requires_grad = item.requires_grad;
  entry.chunks = dcp::Chunks(texts);
  return entry;
}

// Adds an entry for every name that a rank holds something of; returns where each is.
std::unordered_map<std::string, std::size_t> add_entries(
    const std::vector<std::vector<WriteItem>>& proposals, dcp::Metadata& metadata) {
  std::unordered_map<std::string, std::size_t> index;
  const auto texts = std::make_shared<dcp::ItemTexts>();
  for (const auto& items : proposals) {
    for (const WriteItem& item : items) {
      if (!item.held || !index.emplace(item.name, metadata.entries.size()).second) continue;
      metadata.entries.push_back(entry_of(item, texts));
    }
  }
  return index;
}

}  // namespace

WriteItem item_of(const Leaf& leaf, std::size_t index) {
  WriteItem item;
  item.name = leaf.name;
  item.path = leaf.path;
  item.leaf = index;
  item.is_tensor = leaf.value.is(Value::Kind::tensor);
  if (!item.is_tensor) return item;
  const Tensor& tensor = leaf.value.as_tensor();
  item.dtype = tensor.dtype;
  item.shape = tensor.shape;
  item.requires_grad = tensor.requires_grad;
  return item;
}

std::vector<WriteItem> propose(const std::vector<Leaf>& leaves) {
  std::vector<WriteItem> items;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    WriteItem item = item_of(leaves[i], i);
    if (!item.is_tensor) {
      items.push_back(std::move(item));
      continue;
    }
    const Tensor& tensor = leaves[i].value.as_tensor();
    const std::size_t before = items.size();
    add_chunks(tensor, item, items);
    if (items.size() > before || numel(tensor.shape) == 0) continue;
    item.held = false;
    items.push_back(std::move(item));
  }
  return items;
}

SavePlan plan_save(const std::vector<std::vector<WriteItem>>& proposals) {
  Collected all;
  for (std::size_t rank = 0; rank < proposals.size(); ++rank) {
    for (std::size_t i = 0; i < proposals[rank].size(); ++i)
      all.add(proposals, {.rank = rank, .item = i});
  }
  all.require_covered();
  return assign(all.targets, proposals.size());
}

dcp::Metadata metadata_of(const std::vector<std::vector<WriteItem>>& proposals,
                          const std::vector<std::vector<WrittenItem>>& written) {
  dcp::Metadata metadata;
  const std::unordered_map<std::string, std::size_t> index = add_entries(proposals, metadata);
  for (std::size_t rank = 0; rank < proposals.size(); ++rank) {
    for (const WrittenItem& done : written[rank]) {
      const WriteItem& item = proposals[rank].at(done.item);
      dcp::Entry& entry = metadata.entries[index.at(item.name)];
      if (item.is_tensor) {
        entry.chunks.push_back({item.box, done.where});
      } else {
        entry.item = done.where;
      }
    }
  }
  return metadata;
}

}  // namespace tessera
