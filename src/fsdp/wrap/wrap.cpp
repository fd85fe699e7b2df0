// FullyShardedDataParallel's constructor: which modules become units, and what kind.
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "fsdp/unit/registry.h"
#include "fsdp/wrap/past_holders.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/wrap_scope.h"

namespace tessera {
namespace {

bool has_no_forward(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
}

// Fewer elements than any policy by size asks for.
constexpr std::int64_t kNoSize = -1;

bool is_hybrid_strategy(ShardingStrategy strategy) {
  return is_one_of(strategy, ShardingStrategy::hybrid_shard, ShardingStrategy::hybrid_shard_zero2);
}

[[noreturn]] void throw_without_groups() {
  throw Error(ErrorCode::invalid_argument,
              "Manual wrapping with a hybrid strategy requires explicit specification of process "
              "group or device_mesh: pass the HybridMesh of Mesh::split");
}

// Whole parameters of another type or place than the computation's are shards over one rank.
bool computes_elsewhere(const FullyShardedOptions& options) {
  return options.mixed_precision.param_dtype || options.cpu_offload.offload_params;
}

bool is_whole(const HybridMesh& mesh, ShardingStrategy strategy) {
  return strategy == ShardingStrategy::no_shard || mesh.shard.size() == 1;
}

// Sets who shards the parameters, and who has copies.
void choose_ranks(const HybridMesh& mesh, const FullyShardedOptions& options,
                  detail::UnitSpec& spec) {
  const auto strategy = options.sharding_strategy;
  const bool is_hybrid = is_hybrid_strategy(strategy);
  if (is_hybrid) spec.replicate = mesh.replicate;
  if (!is_whole(mesh, strategy)) {
    spec.shard = mesh.shard;
    return;
  }
  if (strategy != ShardingStrategy::no_shard && mesh.all.size() == 1)
    log_of_all(LogLevel::warning, "FSDP is switching to use `NO_SHARD` since the world size is 1.");
  if (computes_elsewhere(options)) {
    const auto one = mesh.all.split(1);
    spec.shard = one.shard;
    spec.replicate = one.replicate;
  } else if (!is_hybrid) {
    spec.replicate = mesh.all;
  }
}

detail::UnitSpec spec_of(const HybridMesh& mesh, const FullyShardedOptions& options) {
  detail::UnitSpec spec{.mesh = mesh.all};
  spec.options.mixed_precision = options.mixed_precision;
  spec.options.backward_prefetch = options.backward_prefetch;
  spec.options.forward_prefetch = options.forward_prefetch;
  spec.options.ignored_parameters = options.ignored_parameters;
  spec.options.param_init_fn = options.param_init_fn;
  spec.options.offload_to_cpu = options.cpu_offload.offload_params;
  spec.sync_states = options.sync_module_states;
  spec.cast_root_inputs = options.cast_root_forward_inputs;
  if (is_one_of(options.sharding_strategy, ShardingStrategy::shard_grad_op,
                ShardingStrategy::hybrid_shard_zero2))
    spec.options.reshard_after_forward = false;
  spec.geometry =
      options.use_orig_params ? detail::Geometry::flat_original : detail::Geometry::flat;
  spec.flavour = detail::Flavour::fsdp1;
  choose_ranks(mesh, options, spec);
  return spec;
}

// The parameters of a unit to be that require a gradient, or those that do not.
struct Names {
  std::string text;
  std::int64_t elements = 0;
  void add(const std::string& name, std::int64_t count) {
    text += (text.empty() ? "" : ", ") + name;
    elements += count;
  }
};

void require_ignorable(const torch::nn::Module* module) {
  if (module == nullptr)
    throw Error(ErrorCode::invalid_argument, "`ignored_modules` holds no module");
  if (detail::find_unit(module))
    throw Error(ErrorCode::invalid_argument, "`ignored_modules` should not include FSDP modules");
}

// Wrapper chooses the modules that become units, of one wrapping: inner ones first.
class Wrapper {
 public:
  Wrapper(HybridMesh mesh, bool is_hybrid, FullyShardedOptions options)
      : mesh_(std::move(mesh)), is_hybrid_(is_hybrid), options_(std::move(options)) {
    for (const auto& module : options_.ignored_modules) {
      require_ignorable(module.get());
      ignore(*module);
    }
    for (const auto& parameter : options_.ignored_parameters)
      ignored_parameters_.insert(parameter.unsafeGetTensorImpl());
  }

  // Chooses units below `module`; how many elements they have.
  std::int64_t wrap_children(const torch::nn::Module& module, const std::string& name = "") {
    if (detail::calls_past_holders(module)) return leave_whole(module, name);
    const bool has_slots = module.as<torch::nn::SequentialImpl>() != nullptr;
    std::int64_t wrapped = 0;
    for (const auto& child : module.named_children())
      wrapped += wrap_below(child.value(), child.key(), has_slots);
    return wrapped;
  }

  void wrap_root(const std::shared_ptr<torch::nn::Module>& module, detail::SlotMaker slot_maker) {
    shard(module, options_, std::move(slot_maker));
  }

  std::vector<detail::UnitPlan> take() { return std::move(plans_); }

 private:
  [[nodiscard]] bool is_unit(const torch::nn::Module& module) const {
    return detail::find_unit(&module) || chosen_.contains(&module);
  }

  // Neither modules nor parameters of nested units are ignored (fsdp-rows IG2).
  void ignore(const torch::nn::Module& module) {
    ignored_modules_.insert(&module);
    for (const auto& parameter : module.parameters(false))
      options_.ignored_parameters.push_back(parameter);
    for (const auto& child : module.children()) {
      if (!detail::find_unit(child.get())) ignore(*child);
    }
  }

  void shard(const std::shared_ptr<torch::nn::Module>& module, const FullyShardedOptions& options,
             detail::SlotMaker slot_maker) {
    const bool hybrid = is_hybrid_strategy(options.sharding_strategy);
    if (hybrid && !is_hybrid_) throw_without_groups();
    const HybridMesh all{mesh_.all, mesh_.all, mesh_.all};
    auto spec = spec_of(hybrid ? mesh_ : all, options);
    spec.ignored_modules = ignored_modules_;
    chosen_.insert(module.get());
    plans_.push_back({{{module, std::move(slot_maker)}}, std::move(spec)});
  }

  // The rule of PyTorch's _recursive_wrap (fsdp-rows WP1).
  std::int64_t wrap_below(const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
                          bool is_in_slot) {
    if (ignored_modules_.contains(module.get())) return 0;
    const auto& policy = options_.auto_wrap_policy;
    const auto all = count_of(*module);
    if (!policy.decide(*module, /*recurse=*/true, all)) return 0;
    const auto wrapped = wrap_children(*module, name);
    if (!becomes_unit(*module, all - wrapped)) return wrapped;
    auto slot_maker = slot_maker_of(module);
    if (is_in_slot && !slot_maker && all > wrapped && !is_named(*module)) return wrapped;
    shard_by_policy(module, name, std::move(slot_maker));
    return all;
  }

  // The policy names the module, and does not go by sizes alone, which nothing has here. What a
  // policy by size chooses and nobody could call as a unit is none.
  [[nodiscard]] bool is_named(const torch::nn::Module& module) const {
    return options_.auto_wrap_policy.decide(module, /*recurse=*/false, kNoSize);
  }

  // A Sequential calls what its slots hold. Calls of modules whose types nobody knows are not seen.
  [[nodiscard]] detail::SlotMaker slot_maker_of(
      const std::shared_ptr<torch::nn::Module>& module) const {
    const auto& policy = options_.auto_wrap_policy;
    auto maker = policy.slot_maker ? policy.slot_maker(module) : nullptr;
    return maker ? maker : detail::slot_maker_of_libtorch(module);
  }

  [[nodiscard]] bool becomes_unit(const torch::nn::Module& module, std::int64_t unwrapped) const {
    return !is_unit(module) && !has_no_forward(module) &&
           options_.auto_wrap_policy.decide(module, /*recurse=*/false, unwrapped);
  }

  void shard_by_policy(const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
                       detail::SlotMaker slot_maker) {
    const auto& policy = options_.auto_wrap_policy;
    auto options = options_;
    if (policy.adjust) policy.adjust(*module, options);
    require_alike(*module, name, options);
    shard(module, options, std::move(slot_maker));
  }

  // What libtorch calls by itself is no unit. Throws when the policy names it.
  std::int64_t leave_whole(const torch::nn::Module& module, const std::string& name) const {
    detail::refuse_below_callers(module, name,
                                 [&](const torch::nn::Module& below) { return is_named(below); });
    return 0;
  }

  // What modules below `module` share counts once.
  std::int64_t count_of(const torch::nn::Module& module) const {
    std::unordered_set<const c10::TensorImpl*> seen;
    std::int64_t count = 0;
    for (const auto& parameter : module.parameters()) {
      const auto* impl = parameter.unsafeGetTensorImpl();
      if (ignored_parameters_.contains(impl) || !seen.insert(impl).second) continue;
      count += parameter.numel();
    }
    return count;
  }

  [[nodiscard]] bool is_taken(const at::Tensor& tensor) const {
    return tensor.defined() && !ignored_parameters_.contains(tensor.unsafeGetTensorImpl());
  }

  [[nodiscard]] bool is_taken(const torch::nn::Module& module) const {
    return !is_unit(module) && !ignored_modules_.contains(&module);
  }

  void sort(const torch::nn::Module& module, const std::string& prefix, Names& trained,
            Names& frozen) const {
    for (const auto& entry : module.named_parameters(false)) {
      const auto& tensor = entry.value();
      if (!is_taken(tensor)) continue;
      (tensor.requires_grad() ? trained : frozen).add(prefix + entry.key(), tensor.numel());
    }
    for (const auto& child : module.named_children()) {
      if (is_taken(*child.value()))
        sort(*child.value(), prefix + child.key() + ".", trained, frozen);
    }
  }

  // A unit's parameters are frozen all or none, or cost memory (fsdp-rows WP8).
  void require_alike(const torch::nn::Module& module, const std::string& name,
                     const FullyShardedOptions& options) const {
    Names trained, frozen;
    sort(module, name + ".", trained, frozen);
    if (trained.elements == 0 || frozen.elements == 0) return;
    const auto both = name + " has both parameters with requires_grad=True and False. ";
    const auto rest =
        "If possible, wrap the frozen parameters with FSDP separately. The following parameters "
        "have requires_grad=True: " +
        trained.text + ". The following parameters have requires_grad=False: " + frozen.text;
    if (!options.use_orig_params) {
      throw Error(
          ErrorCode::invalid_argument,
          both + "FSDP does not support wrapping such modules when use_orig_params=False. " + rest);
    }
    log_of_all(
        LogLevel::warning,
        both +
            "We do not recommend wrapping such modules since the gradient memory usage will be "
            "higher than expected (" +
            std::to_string(trained.elements + frozen.elements) + " numel instead of " +
            std::to_string(trained.elements) + " numel before sharding via reduce-scatter). " +
            rest);
  }

  HybridMesh mesh_;
  bool is_hybrid_;
  FullyShardedOptions options_;
  std::vector<detail::UnitPlan> plans_;
  std::unordered_set<const torch::nn::Module*> chosen_;
  std::unordered_set<const torch::nn::Module*> ignored_modules_;
  std::unordered_set<const c10::TensorImpl*> ignored_parameters_;
};

// A hybrid strategy under a policy finds its groups by itself (fsdp-rows HY1, HY2).
HybridMesh mesh_for(const HybridMesh& mesh, bool is_hybrid, const FullyShardedOptions& options) {
  const bool wanted = is_hybrid_strategy(options.sharding_strategy);
  if (is_hybrid == wanted) return mesh;
  if (is_hybrid) {
    throw Error(ErrorCode::invalid_argument,
                "a HybridMesh is for the hybrid strategies; pass its `all` to the others");
  }
  if (!options.auto_wrap_policy.decide) throw_without_groups();
  return mesh.all.split(ranks_of_host(mesh.all));
}

void warn_about(const torch::nn::Module& module, const FullyShardedOptions& options) {
  if (has_no_forward(module)) {
    log_of_all(
        LogLevel::warning,
        "FSDP will not all-gather parameters for containers that do not implement forward: " +
            module.name());
  }
  for (const auto& ignored : options.ignored_modules) {
    if (ignored.get() != &module) continue;
    log_of_all(
        LogLevel::warning,
        "Trying to ignore the top-level module passed into the FSDP constructor itself will result "
        "in all parameters being ignored and is not well-supported: " +
            module.name());
  }
}

detail::SlotMaker first_slot_maker(const std::vector<WrapPolicy>& policies,
                                   const std::shared_ptr<torch::nn::Module>& module) {
  for (const auto& policy : policies) {
    auto maker = policy.slot_maker ? policy.slot_maker(module) : nullptr;
    if (maker) return maker;
  }
  return nullptr;
}

void require_no_units(const torch::nn::Module& module) {
  for (const auto& below : module.named_modules()) {
    if (!detail::find_unit(below.value().get())) continue;
    throw Error(ErrorCode::invalid_argument,
                "FSDP auto wrapping requires modules to not already have FSDP applied but found " +
                    below.value()->name())
        .at_key(below.key());
  }
}

}  // namespace

WrapPolicy always_wrap_policy() {
  return {.decide = [](const torch::nn::Module&, bool, std::int64_t unwrapped) {
    return unwrapped != kNoSize;
  }};
}

WrapPolicy size_based_auto_wrap_policy(std::int64_t min_num_params, ModulePredicate force_leaf,
                                       ModulePredicate exclude) {
  if (!force_leaf) {
    force_leaf = [](const torch::nn::Module& module) {
      return dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module) != nullptr;
    };
  }
  if (!exclude) exclude = has_no_forward;
  WrapPolicy policy;
  policy.decide = [min_num_params, force_leaf = std::move(force_leaf),
                   exclude = std::move(exclude)](const torch::nn::Module& module, bool recurse,
                                                 std::int64_t unwrapped) {
    return unwrapped >= min_num_params && !(recurse ? force_leaf : exclude)(module);
  };
  return policy;
}

WrapPolicy lambda_auto_wrap_policy(ModulePredicate choose) {
  WrapPolicy policy;
  policy.decide = [choose = std::move(choose)](const torch::nn::Module& module, bool recurse,
                                               std::int64_t) { return recurse || choose(module); };
  return policy;
}

WrapPolicy custom_policy(
    std::function<bool(const torch::nn::Module& module, FullyShardedOptions& options)> choose) {
  WrapPolicy policy;
  policy.adjust = [choose](const torch::nn::Module& module, FullyShardedOptions& options) {
    auto changed = options;
    if (choose(module, changed)) options = std::move(changed);
  };
  policy.decide = [choose = std::move(choose)](const torch::nn::Module& module, bool recurse,
                                               std::int64_t) {
    FullyShardedOptions unused;
    return recurse || choose(module, unused);
  };
  return policy;
}

WrapPolicy or_policy(std::vector<WrapPolicy> policies) {
  WrapPolicy any;
  const auto shared = std::make_shared<std::vector<WrapPolicy>>(std::move(policies));
  any.decide = [shared](const torch::nn::Module& module, bool recurse, std::int64_t unwrapped) {
    return std::ranges::any_of(*shared, [&](const WrapPolicy& policy) {
      return policy.decide && policy.decide(module, recurse, unwrapped);
    });
  };
  any.slot_maker = [shared](const std::shared_ptr<torch::nn::Module>& module) {
    return first_slot_maker(*shared, module);
  };
  any.adjust = [shared](const torch::nn::Module& module, FullyShardedOptions& options) {
    for (const auto& policy : *shared) {
      if (policy.adjust) policy.adjust(module, options);
    }
  };
  return any;
}

namespace detail {

void wrap_module(const std::shared_ptr<torch::nn::Module>& module, const HybridMesh& mesh,
                 bool is_hybrid, const FullyShardedOptions& options, SlotMaker slot_maker) {
  if (options.auto_wrap_policy.decide) require_no_units(*module);
  warn_about(*module, options);
  const auto where = mesh_for(mesh, is_hybrid, options);
  shard_in_turn(where.all, [&] {
    Wrapper wrapper(where, is_hybrid_strategy(options.sharding_strategy), options);
    if (options.auto_wrap_policy.decide) wrapper.wrap_children(*module);
    wrapper.wrap_root(module, std::move(slot_maker));
    return wrapper.take();
  });
}

}  // namespace detail
}  // namespace tessera
