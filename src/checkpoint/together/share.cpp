#include "checkpoint/together/share.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/crc32.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/save/messages.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "tessera/error.h"

namespace tessera {

void join_sums(FileSums& all, const FileSums& more) {
  for (const auto& [at, sum] : more) all[at].add(sum);
}

namespace {

PlannedLeaf planned_alone(const Leaf& leaf) {
  Tensor tensor = leaf.value.as_tensor();
  tensor.sharded = false;
  tensor.placement.reset();
  return planned({leaf.name, leaf.path, Value(std::move(tensor))}, 0, 1);
}

}  // namespace

PlacedTensors::PlacedTensors(const std::vector<const Leaf*>& leaves, int rank, int ranks) {
  std::vector<PlannedLeaf> planned_leaves;
  for (const Leaf* leaf : leaves) {
    require_readable(leaf->value.as_tensor(), leaf->name);
    PlannedLeaf plan = ranks == 1 ? planned_alone(*leaf) : planned(*leaf, rank, ranks);
    if (!plan.placement) {
      throw Error(ErrorCode::unsupported,
                  "ranks cannot compute which part of the tensor the others hold: save DCP")
          .at_key(leaf->name);
    }
    by_leaf_.emplace(leaf, all_.size());
    all_.push_back({leaf, *plan.placement});
    planned_leaves.push_back(std::move(plan));
  }
  digest_ = digest_of(planned_leaves);
}

namespace {

// One of `count` shares of a box: rows, by torch.chunk's rule. A scalar is in the first one.
std::vector<Box> share_of(const Box& box, const Holders& holders) {
  if (holders.count == 1) return {box};
  if (box.sizes.empty()) return holders.index == 0 ? std::vector{box} : std::vector<Box>();
  Box rows = chunk_of(box, 0, holders.count, holders.index);
  return numel(rows) == 0 ? std::vector<Box>() : std::vector{std::move(rows)};
}

}  // namespace

Holders holders_of(const Placement& placement, int rank, int ranks) {
  const int cycle = placement.parts * placement.stride;
  const int first = part_of_rank(placement, rank) * placement.stride;  // in each cycle
  const int rest = std::clamp(ranks % cycle - first, 0, placement.stride);
  return {ranks / cycle * placement.stride + rest,
          rank / cycle * placement.stride + rank % cycle - first};
}

std::vector<Box> boxes_to_write(const Placement& placement, const Shape& shape,
                                const Sharer& sharer) {
  if (numel(shape) == 0) return {};
  const int part = part_of_rank(placement, sharer.rank);
  const bool is_owners = sharer.owner >= 0 && part_of_rank(placement, sharer.owner) == part;
  if (is_owners && sharer.owner != sharer.rank) return {};
  const std::vector<Box> held = boxes_of_part(placement, shape, part);
  if (is_owners) return held;
  const Holders holders = holders_of(placement, sharer.rank, sharer.ranks);
  std::vector<Box> boxes;
  for (const Box& box : held) {
    for (Box& share : share_of(box, holders)) boxes.push_back(std::move(share));
  }
  return boxes;
}

namespace {

constexpr std::size_t kWindow = 1 << 20;  // bytes: stays in the cache between checksum and write

// The runs of one box.
class BoxRuns {
 public:
  BoxRuns(const Tensor& tensor, TensorReader& reader, const Box& box, const RunTarget& target)
      : reader_(reader),
        box_(box),
        target_(target),
        element_(size_of(tensor.dtype)),
        tensor_size_(byte_size(tensor.dtype, tensor.shape)) {
    const RunSequence runs(box_, tensor.shape);
    if (runs.size() == 1) first_ = runs[0].global;
  }

  void write(const Copy& copy, std::vector<std::byte>& window, Meter* meter) {
    const auto step = static_cast<std::int64_t>(window.size() / element_);
    for (std::int64_t done = 0; done < copy.count; done += step) {
      const std::int64_t count = std::min(step, copy.count - done);
      const ByteView bytes = elements(copy.from_local + done, count, window);
      const std::uint64_t at =
          target_.begin + static_cast<std::uint64_t>(copy.to_local + done) * element_;
      if (target_.sink != nullptr) target_.sink->write_at(target_.offset + at, bytes);
      add(crc32(bytes), bytes.size(), at, copy.from_local + done);
      if (meter != nullptr) meter->add(bytes.size());
    }
  }

  [[nodiscard]] RunSums sums() const {
    RunSums sums = sums_;
    sums.row.terms = row_terms_.of_text(target_.size);
    return sums;
  }

 private:
  // `at`: of the bytes in the row. `local`: of their first element in the box.
  void add(std::uint32_t crc, std::uint64_t size, std::uint64_t at, std::int64_t local) {
    sums_.row.bytes += size;
    row_terms_.add(crc, size, at + size);
    if (!first_) return;
    const std::uint64_t in_tensor = static_cast<std::uint64_t>(*first_ + local) * element_;
    sums_.tensor.add({size, crc32_term(crc, size, tensor_size_ - in_tensor - size)});
  }

  // The elements where they are, or brought together in `window`.
  ByteView elements(std::int64_t begin, std::int64_t count, std::vector<std::byte>& window) {
    const ByteView there = reader_.view(box_, begin, count);
    if (!there.empty()) return there;
    const auto bytes = MutableByteView(window).first(static_cast<std::size_t>(count) * element_);
    reader_.read(box_, begin, count, bytes.data());
    return bytes;
  }

  TensorReader& reader_;
  const Slice box_;
  const RunTarget& target_;
  const std::size_t element_;
  const std::uint64_t tensor_size_;    // bytes
  std::optional<std::int64_t> first_;  // of the box's elements in the tensor, if they are one run
  RunSums sums_;                       // but for the terms of the row
  Crc32Terms row_terms_;
};

}  // namespace

RunSums write_runs(const Tensor& tensor, TensorReader& reader, const std::vector<Box>& boxes,
                   const Slice& slice, const RunTarget& target, Meter* meter) {
  RunSums sums;
  const std::uint64_t most = static_cast<std::uint64_t>(numel(slice)) * size_of(tensor.dtype);
  std::vector<std::byte> window;
  for (const Box& box : boxes) {
    const Slice from[] = {box};
    const Slice to[] = {slice};
    const std::vector<Copy> copies = plan_copies(tensor.shape, from, to);
    if (copies.empty()) continue;
    if (window.empty()) window.resize(std::clamp<std::uint64_t>(most, 16, kWindow));
    BoxRuns runs(tensor, reader, box, target);
    for (const Copy& copy : copies) runs.write(copy, window, meter);
    const RunSums of_box = runs.sums();
    sums.row.add(of_box.row);
    sums.tensor.add(of_box.tensor);
  }
  return sums;
}

}  // namespace tessera
