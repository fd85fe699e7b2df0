#include "fsdp/unit/whole_copies.h"

#include <algorithm>
#include <utility>
#include <variant>

#include <torch/torch.h>

namespace tessera::detail {
namespace {

bool is_rows(const UnitLayout& layout) {
  return !layout.params.empty() && std::holds_alternative<Box>(layout.parts[0][0].slice);
}

std::int64_t ranks_of(const UnitLayout& layout) {
  return static_cast<std::int64_t>(layout.runs.size());
}

// The elements that a parameter has room for in each shard.
std::int64_t room_of(const UnitLayout& layout, std::size_t param) {
  const auto& parts = layout.parts[0];
  const auto end = param + 1 < parts.size() ? parts[param + 1].base : layout.shard_elements;
  return end - parts[param].base;
}

// A whole tensor as [outer][rank][elements of a rank]. For a cut along another dimension than the
// first, which is even.
at::Tensor by_ranks(const ParamPlace& place, const at::Tensor& whole, std::int64_t ranks) {
  std::int64_t outer = 1;
  for (int d = 0; d < place.dim; ++d) outer *= place.shape[static_cast<std::size_t>(d)];
  return whole.view({outer, ranks, place.elements / outer / ranks});
}

void copy_rows(const UnitLayout& from, const at::Tensor& all, const UnitLayout& to,
               const at::Tensor& gathered) {
  const auto ranks = ranks_of(from);
  std::vector<at::Tensor> outs, cut, pieces;
  std::vector<std::int64_t> rooms;
  for (std::size_t i = 0; i < from.params.size(); ++i) {
    const auto room = room_of(from, i);
    if (room == 0) continue;
    const auto& place = to.params[i];
    rooms.push_back(room);
    if (place.dim == 0) {
      outs.push_back(gathered.narrow(0, place.gathered_offset, ranks * room).view({ranks, room}));
      continue;
    }
    outs.push_back(at::empty({ranks, room}, all.options()));
    const auto whole = gathered.narrow(0, place.gathered_offset, place.elements);
    cut.push_back(by_ranks(place, whole, ranks));
    pieces.push_back(outs.back().view({ranks, cut.back().size(0), -1}).transpose(0, 1));
  }
  if (rooms.empty()) return;
  at::split_with_sizes_copy_out(outs, all.view({ranks, -1}), rooms, 1);
  if (!cut.empty()) at::_foreach_copy_(cut, pieces);
}

// A gradient with the elements of each rank one after the other in its first dimension.
at::Tensor in_order_of_ranks(const ParamPlace& place, const at::Tensor& gradient,
                             std::int64_t ranks) {
  if (place.dim == 0) return gradient.view(place.shape);
  return by_ranks(place, gradient, ranks).transpose(0, 1).contiguous().view({ranks, -1});
}

at::Tensor join_rows(const UnitLayout& slices, const std::vector<at::Tensor>& gradients,
                     const at::Tensor& trailer) {
  const auto ranks = ranks_of(slices);
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const auto& place = slices.params[i];
    if (room_of(slices, i) == 0) continue;
    tensors.push_back(gradients[i].defined() ? in_order_of_ranks(place, gradients[i], ranks)
                                             : at::zeros(place.shape, trailer.options()));
  }
  // What kernels take is of one type, and casts on the way to another.
  const bool is_uniform = std::ranges::all_of(
      tensors, [&](const auto& one) { return one.scalar_type() == tensors.front().scalar_type(); });
  if (!is_uniform) {
    for (auto& one : tensors) one = one.to(trailer.scalar_type());
  }
  tensors.push_back(tensors.empty() ? trailer : trailer.to(tensors.front().scalar_type()));
  auto joined = at::empty({ranks, slices.shard_elements + trailer.size(1)}, trailer.options());
  at::_chunk_cat_out(joined, tensors, 0, ranks);
  return joined;
}

// One pass over the gradients: what they do not fill is little, and the rest is not filled twice.
at::Tensor join_ranges(const UnitLayout& slices, const std::vector<at::Tensor>& gradients,
                       const at::Tensor& trailer) {
  const auto ranks = ranks_of(slices);
  const auto joined =
      at::empty({ranks, slices.shard_elements + trailer.size(1)}, trailer.options());
  std::vector<at::Tensor> to{joined.narrow(1, slices.shard_elements, trailer.size(1))};
  std::vector<at::Tensor> from{trailer}, gaps;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto slice = joined[rank];
    std::int64_t done = 0;
    const auto skip_to = [&](std::int64_t begin) {
      if (begin > done) gaps.push_back(slice.narrow(0, done, begin - done));
    };
    for (const auto& run : slices.runs[static_cast<std::size_t>(rank)]) {
      const auto& gradient = gradients[run.param];
      if (!gradient.defined()) continue;
      skip_to(run.local);
      done = run.local + run.count;
      to.push_back(slice.narrow(0, run.local, run.count));
      from.push_back(gradient.view({-1}).narrow(0, run.global, run.count));
    }
    skip_to(slices.shard_elements);
  }
  if (!gaps.empty()) at::_foreach_zero_(gaps);
  at::_foreach_copy_(to, from);
  return joined;
}

}  // namespace

void copy_runs(const UnitLayout& from, const at::Tensor& all, const UnitLayout& to,
               const at::Tensor& gathered) {
  std::vector<at::Tensor> into, pieces;
  for (std::int64_t rank = 0; rank < ranks_of(from); ++rank) {
    for (const auto& run : from.runs[static_cast<std::size_t>(rank)]) {
      into.push_back(
          gathered.narrow(0, to.params[run.param].gathered_offset + run.global, run.count));
      pieces.push_back(all.narrow(0, rank * from.shard_elements + run.local, run.count));
    }
  }
  if (!into.empty()) at::_foreach_copy_(into, pieces);
}

void copy_part(const UnitLayout& whole, const at::Tensor& gathered, const UnitLayout& parts,
               int rank, const at::Tensor& shard) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> into, pieces;
  for (const auto& run : parts.runs[static_cast<std::size_t>(rank)]) {
    into.push_back(shard.narrow(0, run.local, run.count));
    pieces.push_back(
        gathered.narrow(0, whole.params[run.param].gathered_offset + run.global, run.count));
  }
  if (!into.empty()) at::_foreach_copy_(into, pieces);
}

void copy_out(const UnitLayout& from, const at::Tensor& all, const UnitLayout& to,
              const at::Tensor& gathered) {
  const torch::NoGradGuard no_grad;
  if (is_rows(from)) {
    copy_rows(from, all, to, gathered);
  } else {
    copy_runs(from, all, to, gathered);
  }
}

at::Tensor join_slices(const UnitLayout& slices, const std::vector<at::Tensor>& gradients,
                       const at::Tensor& trailer) {
  const torch::NoGradGuard no_grad;
  return is_rows(slices) ? join_rows(slices, gradients, trailer)
                         : join_ranges(slices, gradients, trailer);
}

}  // namespace tessera::detail
