#include "checkpoint/save/file_plan.h"

#include <algorithm>

#include "base/parallel.h"
#include "checkpoint/dcp/zstd_sink.h"
#include "checkpoint/digests/tail.h"
#include "format/torch/torch_file.h"
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

}  // namespace tessera
