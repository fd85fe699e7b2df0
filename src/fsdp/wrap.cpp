// FullyShardedDataParallel's constructor: which modules become units, and what kind.
#include <torch/torch.h>

#include <string>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "fsdp/registry.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace tessera {
namespace {

bool has_no_forward(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
}

bool is_hybrid_strategy(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::hybrid_shard ||
         strategy == ShardingStrategy::hybrid_shard_zero2;
}

// The ways between modules and units, one wrapping.
class Wrapper {
 public:
  Wrapper(const WrapPolicy& policy, detail::UnitSpec spec,
          const std::vector<std::shared_ptr<torch::nn::Module>>& ignored_modules)
      : policy_(policy), spec_(std::move(spec)) {
    for (const auto& module : ignored_modules) {
      if (!module) throw Error(ErrorCode::invalid_argument, "`ignored_modules` holds no module");
      if (detail::find_unit(module.get())) {
        throw Error(ErrorCode::invalid_argument,
                    "`ignored_modules` should not include FSDP modules");
      }
      for (const auto& below : module->modules()) spec_.ignored_modules.insert(below.get());
      for (const auto& parameter : module->parameters())
        spec_.options.ignored_parameters.push_back(parameter);
    }
    for (const auto& parameter : spec_.options.ignored_parameters)
      ignored_parameters_.insert(parameter.unsafeGetTensorImpl());
  }

  // Makes units below `module`; the elements of its parameters that are in none.
  std::int64_t wrap_children(const torch::nn::Module& module) {
    std::int64_t own = 0;
    for (const auto& entry : module.named_parameters(false)) own += counted(entry.value());
    for (const auto& child : module.children()) own += wrap_below(child);
    return own;
  }

  void wrap_root(const std::shared_ptr<torch::nn::Module>& module, bool cast_inputs,
                 detail::SlotMaker slot_maker) {
    auto spec = spec_;
    spec.options.mixed_precision.cast_forward_inputs = cast_inputs;
    detail::shard_module(module, spec, std::move(slot_maker));
  }

 private:
  std::int64_t counted(const at::Tensor& parameter) {
    if (!parameter.defined()) return 0;
    const auto* impl = parameter.unsafeGetTensorImpl();
    if (ignored_parameters_.contains(impl) || !counted_.insert(impl).second) return 0;
    return parameter.numel();
  }

  std::int64_t wrap_below(const std::shared_ptr<torch::nn::Module>& module) {
    if (spec_.ignored_modules.contains(module.get())) return 0;
    const auto all = count_of(*module);
    if (!policy_.decide || !policy_.decide(*module, /*recurse=*/true, all)) {
      wrap_nothing(*module);
      return all;
    }
    const auto rest = wrap_children(*module);
    if (detail::find_unit(module.get()) || has_no_forward(*module) ||
        !policy_.decide(*module, /*recurse=*/false, rest)) {
      return rest;
    }
    detail::shard_module(module, spec_, policy_.slot_maker ? policy_.slot_maker(module) : nullptr);
    return 0;
  }

  // Not looked into: its parameters are counted, so that they are not counted again elsewhere.
  void wrap_nothing(const torch::nn::Module& module) {
    for (const auto& parameter : module.parameters()) counted(parameter);
  }

  std::int64_t count_of(const torch::nn::Module& module) const {
    std::unordered_set<const c10::TensorImpl*> seen = counted_;
    std::int64_t count = 0;
    for (const auto& parameter : module.parameters()) {
      const auto* impl = parameter.unsafeGetTensorImpl();
      if (ignored_parameters_.contains(impl) || !seen.insert(impl).second) continue;
      count += parameter.numel();
    }
    return count;
  }

  const WrapPolicy& policy_;
  detail::UnitSpec spec_;
  std::unordered_set<const c10::TensorImpl*> ignored_parameters_;
  std::unordered_set<const c10::TensorImpl*> counted_;
};

detail::UnitSpec spec_of(const HybridMesh& mesh, bool is_hybrid,
                         const FullyShardedOptions& options) {
  const auto strategy = options.sharding_strategy;
  if (is_hybrid_strategy(strategy) && !is_hybrid) {
    throw Error(ErrorCode::invalid_argument,
                "Manual wrapping with a hybrid strategy requires explicit specification of process "
                "group or device_mesh: pass the HybridMesh of Mesh::split");
  }
  if (is_hybrid && !is_hybrid_strategy(strategy)) {
    throw Error(ErrorCode::invalid_argument,
                "a HybridMesh is for the hybrid strategies; pass its `all` to the others");
  }
  detail::UnitSpec spec{.mesh = mesh.all};
  spec.options.mixed_precision = options.mixed_precision;
  spec.options.backward_prefetch = options.backward_prefetch;
  spec.options.forward_prefetch = options.forward_prefetch;
  spec.options.ignored_parameters = options.ignored_parameters;
  spec.options.param_init_fn = options.param_init_fn;
  spec.sync_states = options.sync_module_states;
  if (strategy == ShardingStrategy::shard_grad_op ||
      strategy == ShardingStrategy::hybrid_shard_zero2) {
    spec.options.reshard_after_forward = false;
  }
  spec.geometry =
      options.use_orig_params ? detail::Geometry::flat_original : detail::Geometry::flat;
  if (is_hybrid) spec.replicate = mesh.replicate;
  const bool casts = options.mixed_precision.param_dtype.has_value();
  const bool is_whole = strategy == ShardingStrategy::no_shard || mesh.shard.size() == 1;
  if (is_whole && strategy != ShardingStrategy::no_shard && mesh.all.size() == 1) {
    log(LogLevel::warning, "FSDP is switching to use `NO_SHARD` since the world size is 1.");
  }
  if (!is_whole) {
    spec.shard = mesh.shard;
  } else if (casts) {
    // Whole parameters of another type than the computation's are shards over one rank.
    const auto one = mesh.all.split(1);
    spec.shard = one.shard;
    spec.replicate = one.replicate;
  } else if (!is_hybrid) {
    spec.replicate = mesh.all;
  }
  return spec;
}

}  // namespace

WrapPolicy always_wrap_policy() {
  return {[](const torch::nn::Module&, bool, std::int64_t) { return true; }, nullptr};
}

WrapPolicy size_based_auto_wrap_policy(std::int64_t min_num_params) {
  return {[min_num_params](const torch::nn::Module& module, bool recurse, std::int64_t unwrapped) {
            if (unwrapped < min_num_params) return false;
            return !recurse ||
                   dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module) == nullptr;
          },
          nullptr};
}

WrapPolicy lambda_auto_wrap_policy(std::function<bool(const torch::nn::Module&)> choose) {
  return {[choose = std::move(choose)](const torch::nn::Module& module, bool recurse,
                                       std::int64_t) { return recurse || choose(module); },
          nullptr};
}

WrapPolicy or_policy(std::vector<WrapPolicy> policies) {
  WrapPolicy any;
  const auto shared = std::make_shared<std::vector<WrapPolicy>>(std::move(policies));
  any.decide = [shared](const torch::nn::Module& module, bool recurse, std::int64_t unwrapped) {
    for (const auto& policy : *shared) {
      if (policy.decide && policy.decide(module, recurse, unwrapped)) return true;
    }
    return false;
  };
  any.slot_maker = [shared](const std::shared_ptr<torch::nn::Module>& module) -> detail::SlotMaker {
    for (const auto& policy : *shared) {
      auto maker = policy.slot_maker ? policy.slot_maker(module) : nullptr;
      if (maker) return maker;
    }
    return nullptr;
  };
  return any;
}

namespace detail {

void wrap_module(const std::shared_ptr<torch::nn::Module>& module, const HybridMesh& mesh,
                 bool is_hybrid, const FullyShardedOptions& options, SlotMaker slot_maker) {
  if (options.auto_wrap_policy.decide) {
    for (const auto& below : module->named_modules()) {
      if (!find_unit(below.value().get())) continue;
      throw Error(
          ErrorCode::invalid_argument,
          "FSDP auto wrapping requires modules to not already have FSDP applied but found " +
              below.value()->name())
          .at_key(below.key());
    }
  }
  Wrapper wrapper(options.auto_wrap_policy, spec_of(mesh, is_hybrid, options),
                  options.ignored_modules);
  wrapper.wrap_children(*module);
  const bool cast_inputs =
      options.cast_root_forward_inputs || options.mixed_precision.cast_forward_inputs;
  wrapper.wrap_root(module, cast_inputs, std::move(slot_maker));
}

}  // namespace detail
}  // namespace tessera
