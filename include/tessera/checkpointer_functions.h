// OLMo's functions beside its checkpointers: parts of a checkpoint, and single files of it.
#pragma once

#include <optional>
#include <string>

#include "tessera/checkpoint.h"
#include "tessera/module_ref.h"
#include "tessera/optimizer_ref.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

struct StateSaveOptions {
  bool save_overwrite = false;  // false: what is there is `already_exists`
  // A directory that gets a copy when all is saved here, see tessera/upload.h.
  std::optional<Location> upload_to = {};
};
struct StateLoadOptions {
  bool load_optimizer_state = true;
  // A directory with copies of some of the files, see tessera/cached_store.h.
  std::optional<Location> local_cache = {};
};

// Saves the model and the optimizer as a DCP checkpoint in the directory "model_and_optim" of
// `checkpoint`: what is in a checkpoint of `torch_new` beside the trainer's files. Throws what
// save() and upload() throw. Collective.
SaveResult save_fsdp_model_and_optim_state(const Location& checkpoint, ModuleRef model,
                                           OptimizerRef optim, Group& group,
                                           const StateSaveOptions& options = {});

// The reverse, as restore_checkpoint of tessera/checkpointer.h finds names and groups. Throws what
// that throws. Collective.
void load_fsdp_model_and_optim_state(const Location& checkpoint, ModuleRef model,
                                     OptimizerRef optim, Group& group,
                                     const StateLoadOptions& options = {});

// Gives the optimizer this rank's part of a whole state in memory, {"state", "param_groups"}, by
// names or by numbers with `param_names`. Every rank has the same. One group becomes two where the
// optimizer has a second one without weight decay. Throws `mismatch` for other groups, before
// anything is changed. Local.
void load_fsdp_optim_state(ModuleRef model, OptimizerRef optim, const Value& optim_state);

// OLMo's save_state_dict: saves a tree as the torch.save file `name` in the directory `dir`. It
// appears whole. By one process.
void save_state_file(const Location& dir, const std::string& name, const Value& state,
                     const StateSaveOptions& options = {});

// OLMo's load_state_dict: the tree in the file `name` of the directory `dir`. If `name` ends in
// ".pt", a file with that name and ".safetensors" comes first; names of OLMo's in it become nested
// dicts again. Throws `not_found` if there is neither. By one process.
[[nodiscard]] Value load_state_file(const Location& dir, const std::string& name,
                                    const StateLoadOptions& options = {});

// Fills a model that is not sharded from the directory "model_and_optim" of `checkpoint`. By one
// process.
void load_model_state(const Location& checkpoint, ModuleRef model);

}  // namespace tessera
