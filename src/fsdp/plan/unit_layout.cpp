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

}  // namespace

std::vector<ParamRun>::const_iterator first_run(const std::vector<ParamRun>& runs,
                                                std::int64_t begin) noexcept {
  return std::ranges::partition_point(
      runs, [&](const ParamRun& run) { return run.local + run.count <= begin; });
}

UnitLayout flat_layout(const std::vector<Shape>& shapes, int world, std::int64_t alignment) {
  UnitLayout layout;
  std::int64_t end = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> gaps;  // [begin, end) in the flat array
  const auto fill_up = [&](std::int64_t multiple) {
    const auto begin = std::exchange(end, (end + multiple - 1) / multiple * multiple);
    if (begin != end) gaps.emplace_back(begin, end);
  };
  for (const auto& shape : shapes) {
    if (alignment > 0) fill_up(alignment);
    layout.params.push_back({shape, numel(shape), end});
    end += numel(shape);
  }
  if (alignment > 0) fill_up(world);
  const auto chunk = chunk_size(end, world);
  layout.gathered_elements = chunk * world;
  layout.shard_elements = chunk;
  for (int rank = 0; rank < world; ++rank) {
    const auto begin = rank * chunk, limit = begin + chunk;
    auto& runs = layout.runs.emplace_back();
    auto& parts = layout.parts.emplace_back();
    auto& padding = layout.padding.emplace_back();
    for (std::size_t param = 0; param < layout.params.size(); ++param) {
      const auto& place = layout.params[param];
      const auto first = std::max(place.gathered_offset, begin);
      const auto last = std::min(place.gathered_offset + place.elements, limit);
      if (first >= last) {
        parts.push_back({FlatRange{place.elements, place.elements}});
        continue;
      }
      const Run run{first - place.gathered_offset, first - begin, last - first};
      runs.push_back({run, param});
      parts.push_back({FlatRange{run.global, run.global + run.count}, run.local});
    }
    for (const auto& [from, to] : gaps) {
      const auto first = std::max(from, begin), last = std::min(to, limit);
      if (first < last) padding.push_back({first - begin, last - begin});
    }
  }
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
