// FullyShardedDataParallel: PyTorch's FSDP1 for modules written in C++.
//
//   FullyShardedDataParallel<Gpt> model(Gpt(config), mesh,
//       {.auto_wrap_policy = module_wrap_policy<BlockImpl>(), .use_orig_params = true});
//   AdamW optimizer(model.parameters());
//   cross_entropy(model(input), target).backward();
//   model.clip_grad_norm_(1.0);
//   optimizer.step();
//
// Each unit's parameters lie end to end in one flat array, which is cut into equal parts, one per
// rank: the geometry of FSDP1's checkpoints, to the byte. Without `use_orig_params` the optimizer
// sees one flat parameter per unit, with it a flat part of each parameter. All else is
// fully_shard's engine, and its rules on which calls are seen apply: units that a policy chooses
// must be called through TESSERA_MODULE holders or tessera::call_module, or lie in a Sequential if
// the policy knows their type or they are layers of libtorch. Modules are not replaced, so names
// stay what they are.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>

#include "tessera/fsdp.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"
#include "tessera/pytorch/state_dict.h"

namespace [[gnu::visibility("default")]] tessera {

// Communication hooks: another way to average a unit's gradients.
//
//   FullyShardedDataParallel<Gpt> model(Gpt(config), mesh);
//   model.register_comm_hook(bf16_compress_hook(mesh));

// Called on every rank in the same order, once per unit and backward, instead of FSDP's own
// reduction and division. `gradient` is one-dimensional, and the hook may change it. If parameters
// are sharded, it holds the parts of all ranks end to end, and the hook writes to `shard` (1/N of
// its size) what this rank's part should be. If they are whole (NO_SHARD), `shard` is undefined,
// and the hook works in place. A rank without a gradient for a parameter gives zeros. Nothing else
// runs while a hook does: it may communicate as it likes, alike on every rank. It may not hold a
// copy of the mesh, because the mesh owns the units that hold the hook.
using CommHook = std::function<void(torch::Tensor& gradient, torch::Tensor& shard)>;

// Averages over the ranks of `mesh`, as without a hook: PyTorch's allreduce_hook and
// reduce_scatter_hook. The mesh must outlive training with it.
[[nodiscard]] CommHook average_hook(const Mesh& mesh);
// The same, but gradients travel, and are summed, in a shorter type.
[[nodiscard]] CommHook fp16_compress_hook(const Mesh& mesh);
[[nodiscard]] CommHook bf16_compress_hook(const Mesh& mesh);

// What is sharded, and how long parameters stay gathered.
enum class ShardingStrategy : std::uint8_t {
  full_shard,          // parameters, gradients, optimizer state; freed after forward
  shard_grad_op,       // the same, but gathered from forward until after backward
  no_shard,            // nothing is sharded: data parallel
  hybrid_shard,        // full_shard within mesh.shard, copies over mesh.replicate
  hybrid_shard_zero2,  // shard_grad_op, likewise
};

// Keeps shards, their gradients and the optimizer's state on the CPU: fully_shard's offload_to_cpu.
struct CPUOffload {
  bool offload_params = false;
};

struct FullyShardedOptions;
using ModulePredicate = std::function<bool(const torch::nn::Module& module)>;

// Chooses which modules below the wrapped one become units of their own.
struct WrapPolicy {
  // Called with `recurse` to ask whether to look inside a module, then without it to ask whether
  // the module becomes a unit. `unwrapped` counts the elements below it that are in no unit yet.
  // Empty: no module becomes a unit.
  std::function<bool(const torch::nn::Module& module, bool recurse, std::int64_t unwrapped)>
      decide = {};
  // For a module in a slot of a Sequential. Returns null if the policy does not know its type.
  std::function<detail::SlotMaker(const std::shared_ptr<torch::nn::Module>& module)> slot_maker =
      {};
  // Changes the root's options for a module that becomes a unit. Empty: it changes nothing.
  std::function<void(const torch::nn::Module& module, FullyShardedOptions& options)> adjust = {};
};

// Whatever the policy, a module that one of libtorch's own modules calls by itself (the layers of a
// Transformer) becomes no unit. Policies by size and `always` pass over it; policies that name it
// are refused. Policies by size and `always` also pass over a module of the program's own in a slot
// of a Sequential, but not over what is inside of it. Which calls a class makes by itself they
// cannot know: where it calls a layer `fc(x)` by libtorch's holder, let the policy leave that out,
// or make it `call_module(fc, x)`.
[[nodiscard]] WrapPolicy always_wrap_policy();
// Modules of at least `min_num_params` elements. The policy does not look into modules that
// `force_leaf` names, and modules that `exclude` names become no units. Empty: `force_leaf` names
// MultiheadAttention; `exclude` names ModuleList and ModuleDict, which become none in any case.
[[nodiscard]] WrapPolicy size_based_auto_wrap_policy(std::int64_t min_num_params = 100'000'000,
                                                     ModulePredicate force_leaf = {},
                                                     ModulePredicate exclude = {});
[[nodiscard]] WrapPolicy lambda_auto_wrap_policy(ModulePredicate choose);
// Modules for which `choose` is true. It gets the root's options and may change them for the
// module: PyTorch's CustomPolicy. It is called more than once.
[[nodiscard]] WrapPolicy custom_policy(
    std::function<bool(const torch::nn::Module& module, FullyShardedOptions& options)> choose);
// Modules that any of the policies chooses.
[[nodiscard]] WrapPolicy or_policy(std::vector<WrapPolicy> policies);

// Modules of these types: `module_wrap_policy<BlockImpl>()`.
template <typename... Impls>
[[nodiscard]] WrapPolicy module_wrap_policy() {
  WrapPolicy policy;
  policy.decide = [](const torch::nn::Module& module, bool recurse, std::int64_t) {
    return recurse || ((dynamic_cast<const Impls*>(&module) != nullptr) || ...);
  };
  policy.slot_maker = [](const std::shared_ptr<torch::nn::Module>& module) {
    detail::SlotMaker maker;
    const auto try_type = [&]<typename Impl>(std::type_identity<Impl>) {
      if (auto typed = std::dynamic_pointer_cast<Impl>(module); typed && !maker)
        maker = detail::make_slot_maker(typed);
    };
    (try_type(std::type_identity<Impls>()), ...);
    return maker;
  };
  return policy;
}

// The arguments of PyTorch's constructor, as far as C++ has them; the mesh stands for device and
// process group. `sync_module_states` sends rank 0's values unit by unit, so a module may be on the
// meta device. Only rank 0's module needs values then; on other ranks `param_init_fn` fills it
// first.
struct FullyShardedOptions {
  ShardingStrategy sharding_strategy = ShardingStrategy::full_shard;
  WrapPolicy auto_wrap_policy = {};
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::pre;
  MixedPrecision mixed_precision = {.cast_forward_inputs = false};
  bool cast_root_forward_inputs = true;  // only if the module is the root
  CPUOffload cpu_offload = {};
  std::vector<torch::Tensor> ignored_parameters = {};
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules = {};
  std::function<void(torch::nn::Module&)> param_init_fn = {};
  bool sync_module_states = false;
  bool forward_prefetch = false;
  bool use_orig_params = false;
};

namespace detail {

// Makes units of `module` and of what the policy chooses below it. Collective.
void wrap_module(const std::shared_ptr<torch::nn::Module>& module, const HybridMesh& mesh,
                 bool is_hybrid, const FullyShardedOptions& options, SlotMaker slot_maker);

// Joins the units below `module` if no forward has done so yet.
[[nodiscard]] bool is_root(const torch::nn::Module& module);
// Throws `invalid_argument` with the text `otherwise` if the module is not the root.
void require_root(const torch::nn::Module& module, const std::string& otherwise);
void register_comm_hook(const torch::nn::Module& module, const CommHook& hook);

}  // namespace detail

// The modules at and below `module` that are units, in the order of modules(), each once; with
// `root_only` only those that are roots. Modules below one that `replicate` was applied to are left
// out.
[[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> fsdp_modules(ModuleRef module,
                                                                           bool root_only = false);

template <typename Holder>
class FullyShardedDataParallel {
 public:
  // Takes over `module`, a holder. A hybrid strategy needs a HybridMesh; with a policy it may
  // instead shard over the ranks of each host (tessera/pytorch/wrap_scope.h). Throws
  // `invalid_argument` for a hybrid strategy with neither, for a policy with a module that has
  // units already, and for what fully_shard refuses. With one rank, or a hybrid strategy with one
  // rank per shard, every strategy is no_shard. Collective.
  FullyShardedDataParallel(Holder module, const Mesh& mesh, const FullyShardedOptions& options = {})
      : FullyShardedDataParallel(std::move(module), {mesh, mesh, mesh}, false, options) {}
  FullyShardedDataParallel(Holder module, const HybridMesh& mesh,
                           const FullyShardedOptions& options = {})
      : FullyShardedDataParallel(std::move(module), mesh, true, options) {}

  template <typename... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) {
    return call_module(module(), std::forward<Arguments>(arguments)...);
  }

  [[nodiscard]] Holder& module() noexcept { return module_.holder(); }
  [[nodiscard]] const Holder& module() const noexcept { return module_.holder(); }
  auto* operator->() { return module().get(); }
  auto* operator->() const { return module().get(); }

  // What an optimizer takes: a flat parameter per unit, or with use_orig_params a flat part of
  // every parameter.
  [[nodiscard]] std::vector<ShardedParameter> parameters() const {
    return sharded_parameters(module());
  }
  // The parameters whose gradient is there.
  [[nodiscard]] std::vector<ShardedParameter> params_with_grad() const {
    auto with = parameters();
    std::erase_if(with, [](const auto& parameter) { return !parameter.local.grad().defined(); });
    return with;
  }
  // True if no unit's module contains this one.
  [[nodiscard]] bool is_root() const { return detail::is_root(*module()); }
  // Backward accumulates gradients on this rank while the returned object lives. Throws
  // `invalid_argument` on a module inside another one, and in a forward or backward.
  [[nodiscard]] NoSync no_sync() const {
    detail::require_root(*module(), "`no_sync()` on inner FSDP instances is not supported");
    return NoSync(module());
  }
  // See clip_grad_norm of tessera/optim.h. Throws as no_sync does. Collective.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0) const {
    detail::require_root(*module(),
                         "clip_grad_norm should only be called on the root (parent) instance");
    return clip_grad_norm(parameters(), max_norm, norm_type);
  }
  // Calls `initialize` with the module and every module below it, while all parameters are whole.
  // Each rank keeps its own part of the changes. Collective.
  void apply(const std::function<void(torch::nn::Module&)>& initialize) {
    const FullParams whole(module());
    const torch::NoGradGuard no_grad;
    module()->apply(initialize);
  }
  // Sets another way to average gradients, see tessera/pytorch/fully_sharded_data_parallel.h.
  // Throws `invalid_argument` on a module inside another one, for a hybrid strategy, for an empty
  // hook, and if there is a hook already.
  void register_comm_hook(const CommHook& hook) { detail::register_comm_hook(*module(), hook); }

 private:
  FullyShardedDataParallel(Holder module, const HybridMesh& mesh, bool is_hybrid,
                           const FullyShardedOptions& options)
      : module_(std::move(module)) {
    const auto inner = this->module().ptr();
    detail::wrap_module(inner, mesh, is_hybrid, options, detail::make_slot_maker(inner));
    module_.take_units();
  }

  detail::WrappedModule<Holder> module_;
};

}  // namespace tessera
