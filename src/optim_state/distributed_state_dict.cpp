#include "tessera/pytorch/distributed_state_dict.h"

#include "optim_state/model_by_name.h"
#include "optim_state/optim_by_name.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Options = DistributedStateDictOptions;
using detail::ModelSetter;
using detail::OptimizersSetter;

void require_possible(const Options& options) {
  if (options.broadcast_from_rank0 && !options.full_state_dict) {
    throw Error(ErrorCode::invalid_argument,
                "full_state_dict must be true when broadcast_from_rank0 is true");
  }
}

void require_any(const OptimizerRefs& optimizers) {
  if (optimizers.all().empty()) throw Error(ErrorCode::invalid_argument, "no optimizer was given");
}

}  // namespace

Value get_model_state_dict(ModuleRef model, const Options& options) {
  require_possible(options);
  if (detail::state_entries(model.get()).empty())
    throw Error(ErrorCode::invalid_argument, "the model has neither parameters nor buffers");
  return detail::model_by_name(model, options);
}

Value get_optimizer_state_dict(ModuleRef model, const OptimizerRefs& optimizers,
                               const Options& options) {
  require_possible(options);
  require_any(optimizers);
  return detail::optimizers_by_name(model.get(), optimizers.all(), options);
}

std::pair<Value, Value> get_state_dict(ModuleRef model, const OptimizerRefs& optimizers,
                                       const Options& options) {
  auto of_model = get_model_state_dict(model, options);
  return {std::move(of_model), get_optimizer_state_dict(model, optimizers, options)};
}

IncompatibleKeys set_model_state_dict(ModuleRef model, const Value& state, const Options& options) {
  require_possible(options);
  return ModelSetter(model, state, /*may_be_empty=*/false, options).apply();
}

void set_optimizer_state_dict(ModuleRef model, const OptimizerRefs& optimizers, const Value& state,
                              const Options& options) {
  require_possible(options);
  require_any(optimizers);
  OptimizersSetter(model.get(), optimizers.all(), state, options).apply();
}

IncompatibleKeys set_state_dict(ModuleRef model, const OptimizerRefs& optimizers,
                                const Value& model_state, const Value& optim_state,
                                const Options& options) {
  require_possible(options);
  require_any(optimizers);
  ModelSetter of_model(model, model_state, /*may_be_empty=*/true, options);
  const OptimizersSetter of_optimizers(model.get(), optimizers.all(), optim_state, options);
  of_optimizers.apply();
  return of_model.apply();
}

}  // namespace tessera
