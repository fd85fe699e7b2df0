#include "checkpoint/save/file_plan.h"

#include <algorithm>

#include "checkpoint/digests/tail.h"
#include "format/torch/torch_file.h"

namespace tessera {
namespace {

std::uint64_t length_of(const Value& tree) {
  return torch_file::Writer(tree, "archive").size();
}

}  // namespace

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

FilePlan::FilePlan(int first, int ranks, int files)
    : first_(first), files_(files), all_(static_cast<std::size_t>(ranks) * files) {}

std::size_t FilePlan::first_file_of(int rank) const {
  return static_cast<std::size_t>(rank - first_) * static_cast<std::size_t>(files_);
}

ItemPlace FilePlan::place(int rank, std::uint64_t length, std::uint64_t bytes) {
  const auto begin = all_.begin() + static_cast<std::ptrdiff_t>(first_file_of(rank));
  const auto least = std::ranges::min_element(begin, begin + files_, {}, &File::load);
  const ItemPlace place{static_cast<int>(least - begin), least->end, length};
  least->load += std::max<std::uint64_t>(bytes, 1);
  least->end += length;
  ++least->items;
  return place;
}

std::uint64_t FilePlan::size_of(int rank, int file) const {
  const File& planned = all_[first_file_of(rank) + static_cast<std::size_t>(file)];
  return planned.items == 0 ? 0 : planned.end + tail_size(planned.end, planned.items);
}

}  // namespace tessera
