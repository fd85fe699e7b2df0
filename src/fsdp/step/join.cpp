#include "tessera/ddp.h"

#include <ATen/MemoryOverlap.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <unordered_set>
#include <utility>

#include "comm/whereabouts.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"
#include "tessera/sync_batchnorm.h"

namespace tessera {
namespace {

// Zeros are made, not multiplied: zero times infinity is NaN. What has no gradient has none.
torch::Tensor weighted(const torch::Tensor& gradient, double weight) {
  if (weight == 1 || !gradient.defined()) return gradient;
  return weight == 0 ? torch::zeros_like(gradient) : gradient * weight;
}

// Tensor::remove_hook empties the hook's place and keeps it, since those behind have numbers. With
// none behind it is nobody's: a model that has a Join in each epoch would get longer lists.
void remove_hook(const torch::Tensor& parameter, unsigned hook) {
  parameter.remove_hook(hook);
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr || !meta->cpp_hooks_list_) return;
  if (auto& hooks = *meta->cpp_hooks_list_; hook + 1 == hooks.size()) hooks.pop_back();
}

}  // namespace

struct Join::Impl {
  struct Watched {
    torch::Tensor parameter;
    unsigned hook;
  };
  struct SavedBuffer {
    torch::Tensor buffer, values;
  };

  Mesh mesh;
  JoinOptions options;
  std::vector<ModuleRef> models;
  std::vector<torch::Tensor> parameters, buffers;  // each once
  std::vector<SyncBatchNormImpl*> norms;           // the buffers of which are alike on all ranks
  // The weight of what this rank runs backward. Its hooks have it too.
  std::shared_ptr<double> weight = std::make_shared<double>(1.0);
  std::vector<Watched> watched;
  std::unordered_set<const c10::TensorImpl*> is_watched;
  std::vector<SavedBuffer> saved_buffers;  // while a stand-in runs

  Impl(const std::vector<ModuleRef>& joined, Mesh ranks, const JoinOptions& wanted)
      : mesh(std::move(ranks)), options(wanted), models(joined) {
    std::unordered_set<const c10::TensorImpl*> seen;
    const auto take = [&](const std::vector<torch::Tensor>& tensors, auto& into) {
      for (const auto& tensor : tensors) {
        if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second)
          into.push_back(tensor);
      }
    };
    for (const auto& model : models) {
      for (const auto& module : model.get().modules(/*include_self=*/false)) take_norm(*module);
      take_norm(model.get());
    }
    for (const auto* norm : norms) {
      for (const auto& buffer : norm->buffers()) seen.insert(buffer.unsafeGetTensorImpl());
    }
    for (const auto& model : models) {
      take(model.get().parameters(), parameters);
      take(model.get().buffers(), buffers);
    }
  }

  // Batches that weigh one need no hooks, and frozen parameters take none.
  void watch() {
    for (const auto& parameter : parameters) {
      if (!parameter.requires_grad()) continue;
      if (!is_watched.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const auto hook = parameter.register_hook(
          [all = weight](const torch::Tensor& gradient) { return weighted(gradient, *all); });
      watched.push_back({parameter, hook});
    }
  }

  void take_norm(const torch::nn::Module& module) {
    auto* norm = const_cast<SyncBatchNormImpl*>(dynamic_cast<const SyncBatchNormImpl*>(&module));
    if (norm != nullptr) norms.push_back(norm);
  }

  // A stand-in counts in no statistics of all ranks.
  void set_counts(bool counts) {
    for (auto* norm : norms) norm->counts = counts;
  }

  // An expanded one has elements in common: no operator writes to it.
  void keep_buffers() {
    for (const auto& buffer : buffers) {
      if (at::has_internal_overlap(buffer) != at::MemOverlap::Yes)
        saved_buffers.push_back({buffer, buffer.detach().clone()});
    }
  }

  void put_buffers_back() {
    const torch::NoGradGuard no_grad;
    for (const auto& [buffer, values] : std::exchange(saved_buffers, {})) buffer.copy_(values);
  }

  [[nodiscard]] int count(bool has_input) const {
    const Purpose purpose("counting the ranks that have input");
    return static_cast<int>(std::lround(mesh.all_reduce_sum(has_input ? 1.0 : 0.0)));
  }

  void require_all(int active) const {
    if (!options.throw_on_early_termination || active == mesh.size()) return;
    throw Error(ErrorCode::mismatch, std::to_string(mesh.size() - active) + " of " +
                                         std::to_string(mesh.size()) +
                                         " ranks have no more input, and "
                                         "throw_on_early_termination is set");
  }
};

Join::Join(const std::vector<ModuleRef>& models, const Mesh& mesh, const JoinOptions& options)
    : impl_(std::make_unique<Impl>(models, mesh, options)) {}

Join::~Join() {
  restore_buffers();
  impl_->set_counts(true);
  for (const auto& [parameter, hook] : impl_->watched) remove_hook(parameter, hook);
}

void Join::restore_buffers() {
  impl_->put_buffers_back();
}

bool Join::next(bool has_input) {
  auto& join = *impl_;
  join.put_buffers_back();
  for (const auto& model : join.models)
    detail::refresh_units(model.get(), detail::GradReducer::Look::now);
  const int active = join.count(has_input);
  *join.weight = 1;
  join.set_counts(has_input || active == 0);
  if (active == 0) return false;
  join.require_all(active);
  if (!has_input) {
    *join.weight = 0;
    join.keep_buffers();
  } else if (!join.options.divide_by_initial_world_size) {
    *join.weight = static_cast<double>(join.mesh.size()) / active;
  }
  if (*join.weight != 1) join.watch();
  return true;
}

}  // namespace tessera
