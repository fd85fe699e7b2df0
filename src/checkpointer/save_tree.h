// A live model and its optimizer as OLMo's files have them.
#pragma once

#include <string>
#include <vector>

#include "tessera/module_ref.h"
#include "tessera/optimizer_ref.h"
#include "tessera/value.h"

namespace tessera::detail {

struct OlmoGroups {
  Value::List restored;  // by group: what a checkpoint had that the optimizer does not know
  Value::List orders;    // the names of each group of the checkpoint
  Value options;         // a dict of what every group gets
};

// The optimizer's state with the keys that OLMo's own takes back: in each group `param_names` with
// the wrappers of FSDP1, `sharded`, `max_grad_norm` and `max_grad_norm_ratio`, then what was
// restored and what the options say. Parameters stand in the order that was restored, else sorted
// by their wrapped names, as OLMo makes its groups: files of the kind local number them by it.
[[nodiscard]] Value olmo_optimizer(ModuleRef model, const OptimizerRef& optim,
                                   const OlmoGroups& groups);

// model_state_to_save(), of which only these names; empty: all.
[[nodiscard]] Value olmo_model(ModuleRef model, const std::vector<std::string>& names = {});

}  // namespace tessera::detail
