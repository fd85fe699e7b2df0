#include "fsdp/unit/broadcast.h"

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/digest.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/call_names.h"
#include "torch/mesh_state.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

// Tells tensors of other sizes apart, which Gloo does not survive.
std::string name_of_all(const std::vector<at::Tensor>& tensors) {
  std::int64_t elements = 0;
  std::string all;
  for (const auto& tensor : tensors) {
    elements += tensor.numel();
    all += std::to_string(tensor.numel()) + c10::toString(tensor.scalar_type()) + ' ';
  }
  return std::to_string(tensors.size()) + " states of a module with " + std::to_string(elements) +
         " elements, digest " + digest_text(digest64(std::as_bytes(std::span(all))));
}

void require_data(const std::vector<at::Tensor>& tensors) {
  const bool have_data =
      std::ranges::none_of(tensors, [](const at::Tensor& tensor) { return tensor.is_meta(); });
  if (have_data) return;
  throw Error(ErrorCode::invalid_argument,
              "a module's states cannot be synchronised while they have no data: materialize() "
              "the module first, or let FullyShardedDataParallel do it unit by unit with its "
              "option sync_module_states");
}

}  // namespace

void broadcast_from_first(std::vector<at::Tensor> tensors, const Mesh& mesh,
                          std::size_t message_bytes) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::erase_if(tensors, [&](const at::Tensor& tensor) {
    return !tensor.defined() || !known.insert(tensor.unsafeGetTensorImpl()).second;
  });
  require_data(tensors);
  if (!mesh.process_group() || tensors.empty()) return;
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> sent;
  for (auto& tensor : tensors) {
    tensor = tensor.detach();
    sent.push_back(plain(tensor));
  }
  communicate("broadcast of a module's state", [&] {
    require_same_call(state_of(mesh)->names.get(), "broadcast of " + name_of_all(tensors));
    c10d::broadcast_coalesced(mesh.process_group(), sent, message_bytes, 0);
  });
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!sent[i].is_same(tensors[i])) tensors[i].copy_(sent[i]);
  }
}

}  // namespace tessera::detail
