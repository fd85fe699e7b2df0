#include "tessera/pytorch/optim_state_dict.h"

#include <torch/torch.h>

#include <utility>

#include "optim_state/load_state.h"
#include "optim_state/save_state.h"
#include "tessera/error.h"
#include "tessera/pytorch/state_dict.h"

namespace tessera {
namespace {

using detail::load_state;
using detail::LoadSource;
using detail::save_state;

// The kind that was chosen for the model. Its local kind has no optimizer state (optimizer-rows
// E-32, Q-18).
StateDictOptions chosen(ModuleRef model) {
  const auto options = get_state_dict_type(model);
  if (options.type != StateDictType::local) return options;
  throw Error(ErrorCode::unsupported,
              "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
              "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT");
}

LoadSource source_for(const StateDictOptions& kind) {
  if (kind.optim.rank0_only) return LoadSource::first_rank;
  return kind.type == StateDictType::sharded ? LoadSource::chunks : LoadSource::own;
}

}  // namespace

Value full_optim_state_dict(ModuleRef model, OptimizerRef optim, const FullOptimOptions& options) {
  return save_state(model.get(), optim,
                    {.rank0_only = options.rank0_only,
                     .optim_input = options.optim_input,
                     .group = options.group});
}

Value sharded_optim_state_dict(ModuleRef model, OptimizerRef optim,
                               const ShardedOptimOptions& options) {
  return save_state(model.get(), optim, {.in_chunks = true, .group = options.group});
}

Value optim_state_dict(ModuleRef model, OptimizerRef optim, const OptimStateOptions& options) {
  const auto kind = chosen(model);
  return save_state(model.get(), optim,
                    {.in_chunks = kind.type == StateDictType::sharded,
                     .rank0_only = kind.optim.rank0_only,
                     .state = options.optim_state_dict,
                     .group = options.group});
}

Value shard_full_optim_state_dict(const Value& full, ModuleRef model, const OptimTarget& target) {
  return load_state(
      model.get(), &full,
      {.optim = target.optim, .optim_input = target.optim_input, .group = target.group});
}

Value scatter_full_optim_state_dict(const std::optional<Value>& full, ModuleRef model,
                                    const OptimTarget& target) {
  return load_state(model.get(), full ? &*full : nullptr,
                    {.source = LoadSource::first_rank,
                     .optim = target.optim,
                     .optim_input = target.optim_input,
                     .group = target.group});
}

Value flatten_sharded_optim_state_dict(const Value& sharded, ModuleRef model, OptimizerRef optim,
                                       const ShardedOptimOptions& options) {
  return load_state(model.get(), &sharded,
                    {.source = LoadSource::chunks, .optim = optim, .group = options.group});
}

Value optim_state_dict_to_load(ModuleRef model, OptimizerRef optim, const Value& state,
                               const OptimLoadOptions& options) {
  const bool by_name = options.is_named_optimizer || optim.is_named();
  auto loaded = load_state(model.get(), &state,
                           {.source = source_for(chosen(model)),
                            .optim = optim,
                            .by_name = by_name,
                            .group = options.group});
  if (options.load_directly) load_optimizer_state_dict(optim, loaded, /*keep=*/true);
  return loaded;
}

}  // namespace tessera
