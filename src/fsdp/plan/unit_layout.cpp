#include "fsdp/plan/unit_layout.h"

#include <algorithm>
#include <utility>

#include "layout/boxes.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::int64_t row_count(std::int64_t rows, int world, int rank) noexcept {
  return chunk_begin(rows, world, rank + 1) - chunk_begin(rows, world, rank);
}

// A flat array with `params`, cut into equal ranges that have all of its `elements`.
UnitLayout cut_flat(std::vector<ParamPlace> params, std::int64_t elements, int world) {
  UnitLayout layout;
  layout.params = std::move(params);
  layout.shard_elements = chunk_size(elements, world);
  layout.gathered_elements = layout.shard_elements * world;
  layout.padding.resize(world);
  layout.is_end_to_end = true;
  for (int rank = 0; rank < world; ++rank) {
    const auto begin = rank * layout.shard_elements;
    auto& runs = layout.runs.emplace_back();
    auto& parts = layout.parts.emplace_back();
    for (std::size_t param = 0; param < layout.params.size(); ++param) {
      const auto& place = layout.params[param];
      const auto first = std::max(place.gathered_offset, begin);
      const auto last =
          std::min(place.gathered_offset + place.elements, begin + layout.shard_elements);
      if (first >= last) {
        parts.push_back({FlatRange{place.elements, place.elements}});
        continue;
      }
      const Run run{first - place.gathered_offset, first - begin, last - first};
      runs.push_back({run, param});
      parts.push_back({FlatRange{run.global, run.global + run.count}, run.local});
    }
  }
  return layout;
}

// Parameters end to end, with gaps.
class FlatArray {
 public:
  void append(const Shape& shape) {
    params_.push_back({shape, numel(shape), end_});
    end_ += numel(shape);
  }
  // A gap, so that what comes next starts at such a multiple.
  void fill_up(std::int64_t multiple) {
    const auto begin = std::exchange(end_, (end_ + multiple - 1) / multiple * multiple);
    if (begin != end_) gaps_.push_back({begin, end_});
  }
  [[nodiscard]] UnitLayout cut(int world) const { return cut_flat(params_, end_, world); }
  // The gaps of a rank's shard in what cut() gave.
  [[nodiscard]] std::vector<FlatRange> gaps_in(const UnitLayout& layout, int rank) const {
    const auto begin = rank * layout.shard_elements;
    std::vector<FlatRange> found;
    for (const auto& gap : gaps_) {
      const auto first = std::max(gap.begin, begin);
      const auto last = std::min(gap.end, begin + layout.shard_elements);
      if (first < last) found.push_back({first - begin, last - begin});
    }
    return found;
  }

 private:
  std::vector<ParamPlace> params_;
  std::int64_t end_ = 0;
  std::vector<FlatRange> gaps_;
};

}  // namespace

std::vector<ParamRun>::const_iterator first_run(const std::vector<ParamRun>& runs,
                                                std::int64_t begin) noexcept {
  return std::ranges::partition_point(
      runs, [&](const ParamRun& run) { return run.local + run.count <= begin; });
}

UnitLayout flat_layout(const std::vector<Shape>& shapes, int world, std::int64_t alignment) {
  FlatArray array;
  for (const auto& shape : shapes) {
    if (alignment > 0) array.fill_up(alignment);
    array.append(shape);
  }
  if (alignment > 0) array.fill_up(world);
  auto layout = array.cut(world);
  for (int rank = 0; rank < world; ++rank) layout.padding[rank] = array.gaps_in(layout, rank);
  return layout;
}

UnitLayout aligned_layout(const std::vector<Shape>& shapes, int world, std::int64_t alignment) {
  FlatArray array;
  for (const auto& shape : shapes) {
    array.fill_up(alignment);
    array.append(shape);
  }
  array.fill_up(alignment * world);
  return array.cut(world);
}

UnitLayout over_fewer_ranks(const UnitLayout& whole, int ranks) {
  return cut_flat(whole.params, whole.gathered_elements, ranks);
}

UnitLayout packed(const UnitLayout& whole, const std::vector<std::size_t>& params) {
  UnitLayout layout;
  for (const auto param : params) layout.params.push_back(whole.params[param]);
  for (const auto& held : whole.parts) {
    auto& runs = layout.runs.emplace_back();
    auto& parts = layout.parts.emplace_back();
    std::int64_t local = 0;
    for (std::size_t k = 0; k < params.size(); ++k) {
      const auto& range = std::get<FlatRange>(held[params[k]].slice);
      const auto count = range.end - range.begin;
      if (count > 0) runs.push_back({{range.begin, local, count}, k});
      parts.push_back({range, local});
      local += count;
    }
    layout.shard_elements = std::max(layout.shard_elements, local);
  }
  layout.padding.resize(whole.parts.size());
  return layout;
}

UnitLayout rows_layout(const std::vector<Shape>& shapes, int world, std::int64_t alignment,
                       const std::vector<int>& dims, bool whole_chunks) {
  UnitLayout layout;
  layout.runs.resize(world);
  layout.parts.resize(world);
  layout.padding.resize(world);
  for (std::size_t param = 0; param < shapes.size(); ++param) {
    const auto& shape = shapes[param];
    if (shape.empty()) {
      throw Error(
          ErrorCode::invalid_argument,
          "fully_shard doesn't support scalar parameters; make it a 1D tensor of one element");
    }
    const int dim = param < dims.size() ? dims[param] : 0;
    const auto size = shape[dim];
    std::int64_t outer = 1, inner = 1;
    for (int d = 0; d < dim; ++d) outer *= shape[d];
    for (std::size_t d = dim + 1; d < shape.size(); ++d) inner *= shape[d];
    for (int rank = 0; rank < world; ++rank) {
      const auto count = row_count(size, world, rank) * inner;
      const auto first = chunk_begin(size, world, rank) * inner;
      for (std::int64_t o = 0; o < outer && count > 0; ++o) {
        layout.runs[rank].push_back(
            {{o * size * inner + first, layout.shard_elements + o * count, count}, param});
      }
      layout.parts[rank].push_back(
          {chunk_of(whole(shape), dim, world, rank), layout.shard_elements});
    }
    const auto elements = outer * size * inner;
    layout.params.push_back({shape, elements, layout.gathered_elements, dim});
    const auto chunk = outer * chunk_size(size, world) * inner;
    const auto room = whole_chunks ? world * chunk : elements;
    layout.gathered_elements += (room + alignment - 1) / alignment * alignment;
    layout.shard_elements += chunk;
  }
  return layout;
}

std::vector<Part> parts_of(const UnitLayout& layout, std::size_t param) {
  std::vector<Part> parts;
  std::int64_t base = 0;  // of a rank's shard
  for (const auto& held : layout.parts) {
    parts.push_back(held[param]);
    parts.back().base += base;
    base += layout.shard_elements;
  }
  return parts;
}

}  // namespace tessera
