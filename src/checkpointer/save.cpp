// A live model and its optimizer become a checkpoint of a checkpointer.
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpointer/absent_state.h"
#include "checkpointer/flat_units.h"
#include "checkpointer/hybrid_mesh.h"
#include "checkpointer/kinds.h"
#include "checkpointer/save_tree.h"
#include "fsdp/state/rank0_buffers.h"
#include "tessera/checkpointer.h"
#include "tessera/error.h"
#include "tessera/upload.h"

namespace tessera {
namespace {

std::vector<std::string> names_in(const OlmoSave& layout) {
  std::vector<std::string> names;
  for (const auto& unit : layout.units)
    names.insert(names.end(), unit.names.begin(), unit.names.end());
  return names;
}

void require_dict(const Value& trainer_state) {
  if (trainer_state.is(Value::Kind::dict)) return;
  throw Error(ErrorCode::invalid_argument, "a trainer state is a dict").at_key("train");
}

}  // namespace

SaveResult Checkpointer::save_checkpoint(const Location& dir, ModuleRef model, OptimizerRef optim,
                                         const Value& trainer_state,
                                         const SaveCheckpointOptions& more) {
  SaveOptions options;
  options.kind = detail::names_of(kind_).files;
  options.overwrite = options_.save_overwrite;
  options.threads = threads_;
  Value tree;
  agree(group_, "taking the state of a training", [&] {
    require_dict(trainer_state);
    if (kind_ == CheckpointerKind::local) options.olmo = detail::flat_model_of(model).layout;
    if (kind_ == CheckpointerKind::torch_legacy) options.olmo.mesh = detail::hybrid_mesh_of(model);
    tree = Value::dict(
        {{"model", detail::olmo_model(model, names_in(options.olmo))},
         {"optim", detail::olmo_optimizer(
                       model, optim, {restored_groups_, restored_orders_, options_.group_options})},
         {"train", trainer_state}});
  });
  auto& state = tree.at("model");
  state = detail::with_rank0_buffers(state, model, options.copies, group_);
  auto& optimizer = tree.at("optim");
  optimizer.set_item("state", detail::with_absent_states(optimizer.at("state"), model, group_));
  options.olmo.config = options_.config;
  const auto result = save(tree, dir, options, group_);
  if (more.upload_to) {
    upload(dir, *more.upload_to, {.overwrite = options_.save_overwrite, .threads = threads_},
           group_);
  }
  return result;
}

}  // namespace tessera
