#include "fsdp/unit/whole_parameters.h"

#include <algorithm>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "base/copies.h"
#include "base/digest.h"
#include "fsdp/unit/whole_copies.h"
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
  await_copies();
  communicate("broadcast of a module's state", [&] {
    require_same_call(state_of(mesh)->names.get(), "broadcast of " + name_of_all(tensors));
    c10d::broadcast_coalesced(mesh.process_group(), sent, message_bytes, 0);
  });
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!sent[i].is_same(tensors[i])) tensors[i].copy_(sent[i]);
  }
}

at::Tensor WholeParameters::exchange(const at::Tensor& mine) const {
  return store_.channel().exchange(mine);
}

at::Tensor WholeParameters::gather(const at::Tensor& memory) const {
  return gather_of(store_.shard(), memory);
}

at::Tensor WholeParameters::gather_of(const at::Tensor& mine, const at::Tensor& memory) const {
  const auto all = exchange(mine);
  const auto& layout = store_.layout();
  const auto count = layout.gathered_elements;
  const bool fits =
      memory.defined() && memory.numel() >= count && memory.options().type_equal(mine.options());
  if (layout.is_end_to_end && !fits) return all;
  auto whole = fits ? memory.narrow(0, 0, count) : at::empty({count}, mine.options());
  copy_runs(layout, all, layout, whole);
  return whole;
}

at::Tensor WholeParameters::view(const at::Tensor& whole, std::size_t param) const {
  const auto& place = store_.layout().params[param];
  return whole.narrow(0, place.gathered_offset, place.elements).view(place.shape).detach();
}

at::Tensor WholeParameters::sum(const at::Tensor& mine) const {
  return exchange(mine).view({-1, mine.numel()}).sum(0);
}

void WholeParameters::keep_own(const at::Tensor& whole, const at::Tensor& to) const {
  await_copies();
  const auto& layout = store_.layout();
  for (const auto& run : layout.runs[store_.rank()]) {
    const auto from = layout.params[run.param].gathered_offset + run.global;
    to.narrow(0, run.local, run.count).copy_(whole.narrow(0, from, run.count));
  }
}

void WholeParameters::take_own(std::size_t param, const at::Tensor& whole,
                               const at::Tensor& to) const {
  const auto flat = whole.detach().contiguous().view({-1});
  const auto& runs = store_.layout().runs[store_.rank()];
  for (const auto& run : std::ranges::equal_range(runs, param, {}, &ParamRun::param))
    to.narrow(0, run.local, run.count).copy_(flat.narrow(0, run.global, run.count));
}

}  // namespace tessera::detail
