#include "layout/plan.h"
#include "tessera/layout.h"

namespace tessera {

RunSequence::RunSequence(const Slice& slice, const Shape& shape) {
  if (const FlatRange* range = std::get_if<FlatRange>(&slice)) {
    base_ = range->begin;
    length_ = range->end - range->begin;
    count_ = length_ > 0 ? 1 : 0;
    return;
  }
  const Box& box = std::get<Box>(slice);
  length_ = 1;
  if (numel(box.sizes) == 0) return;
  const Shape strides = contiguous_strides(shape);
  std::size_t split = shape.size();  // dimensions from `split` on lie inside one run
  while (split > 0) {
    --split;
    length_ *= box.sizes[split];
    if (box.sizes[split] != shape[split]) break;
  }
  count_ = 1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    base_ += box.offsets[d] * strides[d];
    if (d >= split || box.sizes[d] == 1) continue;
    outer_sizes_.push_back(box.sizes[d]);
    outer_strides_.push_back(strides[d]);
    count_ *= box.sizes[d];
  }
}

Run RunSequence::operator[](std::int64_t index) const {
  Run run{base_, index * length_, length_};
  std::int64_t rest = index;
  for (std::size_t d = outer_sizes_.size(); d-- > 0;) {
    run.global += (rest % outer_sizes_[d]) * outer_strides_[d];
    rest /= outer_sizes_[d];
  }
  return run;
}

std::int64_t RunSequence::first_ending_after(std::int64_t global) const {
  std::int64_t low = 0;
  std::int64_t high = count_;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if ((*this)[middle].global + length_ > global) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace tessera
