#include "optim_state/chunks.h"

#include <torch/torch.h>

#include <algorithm>
#include <ranges>
#include <utility>

#include "fsdp/unit/whole_copies.h"
#include "fsdp/unit/whole_parameters.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/compat.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

std::int64_t elements_of(const Tensor* tensor) {
  std::int64_t elements = 0;
  if (tensor == nullptr) return 0;
  for (const auto& piece : tensor->pieces) elements += numel(piece.slice);
  return elements;
}

bool is_given(const Tensor* tensor) {
  return tensor != nullptr;
}

// The dtype of the first tensor that is there.
DType common_dtype(const std::vector<Scattered>& tensors) {
  for (const auto* tensor : tensors | std::views::join) {
    if (is_given(tensor)) return tensor->dtype;
  }
  return DType::float32;
}

void require_alike(const Scattered& scattered, DType dtype) {
  const auto first = std::ranges::find_if(scattered, is_given);
  for (const auto* tensor : std::ranges::subrange(first, scattered.end())) {
    if (!is_given(tensor) || (tensor->shape == (*first)->shape && tensor->dtype == dtype)) continue;
    throw Error(ErrorCode::mismatch,
                "the ranks have parts of different tensors: " + to_string(tensor->shape) + " and " +
                    to_string((*first)->shape));
  }
}

}  // namespace

ChunkArray::ChunkArray(std::vector<Scattered> tensors)
    : tensors_(std::move(tensors)), dtype_(common_dtype(tensors_)) {
  for (const auto& scattered : tensors_) require_alike(scattered, dtype_);
  const std::size_t world = tensors_.empty() ? 0 : tensors_.front().size();
  for (std::size_t rank = 0; rank < world; ++rank) place_parts_of(rank);
}

void ChunkArray::place_parts_of(std::size_t rank) {
  auto& bases = bases_.emplace_back();
  std::int64_t end = 0;
  for (const auto& scattered : tensors_)
    bases.push_back(std::exchange(end, end + elements_of(scattered[rank])));
  elements_ = std::max(elements_, end);
}

at::Tensor ChunkArray::give(int rank, const std::vector<const Tensor*>& held) const {
  auto mine = at::zeros({elements_}, scalar_type_of(dtype_));
  for (std::size_t i = 0; i < held.size(); ++i) {
    auto base = bases_[rank][i];
    if (held[i] == nullptr) continue;
    for (const auto& piece : held[i]->pieces) {
      const auto elements = tensor_of_piece(*held[i], piece).contiguous().view({-1});
      copy_quietly(mine, base, elements, 0, elements.numel());
      base += elements.numel();
    }
  }
  return mine;
}

std::vector<Part> ChunkArray::own_parts(std::size_t index, int rank) const {
  std::vector<Part> parts;
  const auto* tensor = tensors_[index][rank];
  if (tensor == nullptr) return parts;
  auto base = bases_[rank][index];
  for (const auto& piece : tensor->pieces) {
    parts.push_back({piece.slice, base});
    base += numel(piece.slice);
  }
  return parts;
}

std::vector<Part> ChunkArray::parts(std::size_t index) const {
  std::vector<Part> all;
  for (std::size_t rank = 0; rank < bases_.size(); ++rank) {
    for (auto& part : own_parts(index, static_cast<int>(rank))) {
      part.base += static_cast<std::int64_t>(rank) * elements_;
      all.push_back(std::move(part));
    }
  }
  return all;
}

at::Tensor exchange_over(const Mesh& mesh, const at::Tensor& mine) {
  const auto& group = mesh.process_group();
  if (!group) return mine.clone();
  auto sent = mine.to(mesh.device());
  auto all = at::empty({mesh.size() * mine.numel()}, sent.options());
  communicate("exchange of optimizer state",
              [&] { compat::all_gather(*group, all, sent)->wait(); });
  return all.cpu();
}

void broadcast_over(const Mesh& mesh, std::vector<at::Tensor>& tensors) {
  for (auto& tensor : tensors) tensor = tensor.to(mesh.device());
  broadcast_from_first(tensors, mesh);
  for (auto& tensor : tensors) tensor = tensor.cpu();
}

}  // namespace tessera::detail
