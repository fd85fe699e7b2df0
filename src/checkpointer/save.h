// The names of OLMo's checkpointers, and which files are theirs (checkpoint-rows O-80).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpointer.h"
#include "tessera/optimizer_ref.h"
#include "tessera/parameter.h"
#include "tessera/storage.h"
#include "tessera/value.h"

namespace tessera::detail {

struct KindNames {
  std::string_view name;
  CheckpointKind files;
};
[[nodiscard]] const KindNames& names_of(CheckpointerKind kind) noexcept;

// `named`: what a config.yaml says. Throws `invalid_argument` if that is another sharded one.
// `full` is beside the sharded ones, so its config names any of them.
void require_named(CheckpointerKind kind, const std::optional<std::string>& named);

// The places of a checkpoint's files.

// The file called `name` in the directory or the store at `where`.
[[nodiscard]] Location inside(const Location& where, const std::string& name);

// The directory `where`, read through a cache if there is one.
[[nodiscard]] Location seen_through(const Location& where, const std::optional<Location>& cache);

// A live model and its optimizer as OLMo's files have them.

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
