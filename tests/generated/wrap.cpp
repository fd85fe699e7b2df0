// Shards a model as a layout says.
#include <string>
#include <unordered_set>
#include <utility>

#include "generated/model.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/unit_controls.h"

namespace tessera::generated {
namespace {

namespace nn = torch::nn;
using ModulePointer = std::shared_ptr<nn::Module>;

// Calls `act` with the module as its own type; false for a type that no layout makes a unit of.
template <typename Act>
bool with_type(const ModulePointer& module, Act&& act) {
  const auto try_types = [&]<typename... Impls>(std::type_identity<Impls>...) {
    const auto try_one = [&]<typename Impl>(std::type_identity<Impl>) {
      const auto typed = std::dynamic_pointer_cast<Impl>(module);
      if (typed) act(typed);
      return typed != nullptr;
    };
    return (try_one(std::type_identity<Impls>()) || ...);
  };
  return try_types(std::type_identity<BlockImpl>(), std::type_identity<nn::LinearImpl>(),
                   std::type_identity<nn::LayerNormImpl>(), std::type_identity<nn::Conv1dImpl>(),
                   std::type_identity<nn::GroupNormImpl>(), std::type_identity<nn::GRUImpl>(),
                   std::type_identity<nn::GRUCellImpl>(), std::type_identity<nn::EmbeddingImpl>(),
                   std::type_identity<nn::MultiheadAttentionImpl>(),
                   std::type_identity<nn::TransformerEncoderLayerImpl>());
}

std::uint64_t hash(const std::string& text, std::uint64_t seed) {
  std::uint64_t value = seed ^ 1469598103934665603ULL;
  for (const char letter : text)
    value = (value ^ static_cast<unsigned char>(letter)) * 1099511628211ULL;
  return value >> 7;
}

// "block2.first.layer" is below block 2; -1: below none.
int block_of(const std::string& name) {
  return name.starts_with("block") ? std::stoi(name.substr(5)) : -1;
}

// What libtorch itself calls cannot be a unit, and experts are chosen by each rank.
bool can_be_inner_unit(const std::string& name, const Case& drawn) {
  const int block = block_of(name);
  if (block < 0) return true;  // the root's first and last layer
  const auto kind = drawn.blocks[block].kind;
  if (kind == BlockKind::experts_by_rank || shares_weight(drawn, block)) return false;
  const bool is_called_by_libtorch =
      name.find(".layer.") != std::string::npos || name.find(".attention.") != std::string::npos;
  return !is_called_by_libtorch;
}

ShardOptions options_of(const Case& drawn, const Layout& layout) {
  ShardOptions options;
  if (layout.keep_after_forward) options.reshard_after_forward = false;
  options.reshard_after_backward = !layout.keep_after_backward;
  options.forward_prefetch = layout.forward_prefetch;
  options.backward_prefetch.reset();
  if (layout.backward_prefetch == 1) options.backward_prefetch = BackwardPrefetch::pre;
  if (layout.backward_prefetch == 2) options.backward_prefetch = BackwardPrefetch::post;
  if (layout.keep_part) options.reshard_after_forward_ranks = 2;
  options.offload_to_cpu = layout.offload;
  if (layout.end_to_end) options.layout = ShardLayout::flat;
  if (layout.divide_factor > 0) options.gradient_divide_factor = layout.divide_factor;
  if (is_low(drawn.precision)) {
    options.mixed_precision.param_dtype = torch::kBFloat16;
    options.mixed_precision.reduce_dtype =
        drawn.precision == Precision::bf16 ? torch::kFloat : torch::kBFloat16;
  }
  const int ranks = sharing_ranks(layout);
  if (layout.last_dimension) {
    options.shard_placement = [ranks](const torch::Tensor& parameter) -> std::optional<int> {
      if (parameter.dim() < 2 || parameter.size(-1) % ranks != 0) return std::nullopt;
      return static_cast<int>(parameter.dim()) - 1;
    };
  }
  return options;
}

using Units = std::vector<std::pair<std::string, ModulePointer>>;

void shard_rows(Root& root, const Case& drawn, const Layout& layout, const Mesh& mesh,
                const Units& units) {
  const auto options = options_of(drawn, layout);
  const auto all = [&](const auto& where) {
    for (auto unit = units.rbegin(); unit != units.rend(); ++unit)
      with_type(unit->second, [&](const auto& typed) { fully_shard(typed, where, options); });
    fully_shard(root, where, options);
  };
  if (layout.hybrid == Hybrid::no) return all(mesh);
  all(mesh.split(sharing_ranks(layout)));
}

void replicate_units(Root& root, const Layout& layout, const Mesh& mesh, const Units& units) {
  ReplicateOptions options;
  if (layout.bucket_bytes > 0)
    options = {.bucket_bytes = layout.bucket_bytes, .first_bucket_bytes = layout.bucket_bytes / 2};
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit)
    with_type(unit->second, [&](const auto& typed) { replicate(typed, mesh, options); });
  replicate(root, mesh, options);
  if (layout.divide_factor > 0) set_gradient_divide_factor(root, layout.divide_factor);
}

void shard_flat(Root& root, const Case& drawn, const Layout& layout, const Mesh& mesh,
                const Units& units) {
  const auto from = options_of(drawn, layout);
  FullyShardedOptions options;
  options.use_orig_params = layout.style == Style::flat_original;
  options.backward_prefetch = from.backward_prefetch;
  options.forward_prefetch = layout.forward_prefetch;
  options.mixed_precision = from.mixed_precision;
  options.mixed_precision.cast_forward_inputs = false;
  options.cpu_offload.offload_params = layout.offload;
  std::unordered_set<const nn::Module*> chosen;
  for (const auto& [name, module] : units) chosen.insert(module.get());
  options.auto_wrap_policy.decide = [chosen](const nn::Module& module, bool recurse, std::int64_t) {
    return recurse || chosen.contains(&module);
  };
  options.auto_wrap_policy.slot_maker = [](const ModulePointer& module) {
    detail::SlotMaker maker;
    with_type(module, [&](const auto& typed) { maker = detail::make_slot_maker(typed); });
    return maker;
  };
  const bool keep = layout.keep_after_forward;
  if (layout.hybrid != Hybrid::no) {
    options.sharding_strategy =
        keep ? ShardingStrategy::hybrid_shard_zero2 : ShardingStrategy::hybrid_shard;
    const FullyShardedDataParallel<Root> wrapped(root, mesh.split(sharing_ranks(layout)), options);
    return;
  }
  options.sharding_strategy = layout.whole_units ? ShardingStrategy::no_shard
                              : keep             ? ShardingStrategy::shard_grad_op
                                                 : ShardingStrategy::full_shard;
  const FullyShardedDataParallel<Root> wrapped(root, mesh, options);
}

}  // namespace

Units units_of(const RootImpl& root, const Case& drawn, const Layout& layout) {
  Units units;
  for (const auto& entry : root.named_modules(std::string(), false)) {
    const auto& name = entry.key();
    if (!with_type(entry.value(), [](const auto&) {})) continue;
    const int block = block_of(name);
    const bool is_block = name == "block" + std::to_string(block);
    const bool is_unit =
        is_block ? layout.units[block]
                 : can_be_inner_unit(name, drawn) &&
                       static_cast<int>(hash(name, layout.inner_seed) % 100) < layout.inner;
    if (is_unit) units.emplace_back(name, entry.value());
  }
  return units;
}

namespace {

void shard(Root& root, const Case& drawn, const Layout& layout, const Mesh& mesh,
           const Units& units) {
  switch (layout.style) {
    case Style::rows:
      return shard_rows(root, drawn, layout, mesh, units);
    case Style::flat:
    case Style::flat_original:
      return shard_flat(root, drawn, layout, mesh, units);
    case Style::replicate:
      return replicate_units(root, layout, mesh, units);
    case Style::ddp: {
      DistributedDataParallelOptions options;
      if (layout.bucket_bytes > 0) options.bucket_bytes = layout.bucket_bytes;
      const DistributedDataParallel<Root> wrapped(root, mesh, options);
      return;
    }
  }
}

}  // namespace

void shard(Root& root, const Case& drawn, const Layout& layout, const Mesh& mesh, int other_unit) {
  auto mine = layout;
  if (other_unit >= 0) mine.units[other_unit] = !mine.units[other_unit];
  shard(root, drawn, layout, mesh,
        layout.style == Style::ddp ? Units() : units_of(*root, drawn, mine));
  if (layout.keep_bytes > 0) set_keep_gathered(root, layout.keep_bytes);
}

}  // namespace tessera::generated
