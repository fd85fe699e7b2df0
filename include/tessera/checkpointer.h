// Checkpointer: OLMo's four checkpointers for models of libtorch.
//
//   Checkpointer checkpointer(CheckpointerKind::local, mesh.checkpoint_group(), {.config = yaml});
//   trainer.set_item("rng", random_state());
//   checkpointer.save_checkpoint("run/step100", model, optimizer, trainer);
//   ...
//   trainer = checkpointer.restore_checkpoint("run/step100", model, optimizer);
//   set_random_state(trainer.at("rng"));
//
// OLMo restores and unshards what is saved here, and what OLMo saved is restored here, on any
// number of ranks and under any way of sharding: FSDP1 with or without original parameters,
// fully_shard, replicate, or none. docs/formats/olmo.md has the files.
//
// Save and restore between steps. Members marked collective are called by every rank of the group.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <torch/types.h>

#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/optimizer_ref.h"
#include "tessera/parameter.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

enum class CheckpointerKind : std::uint8_t {
  full,          // model.pt, optim.pt, train.pt: whole tensors
  torch_new,     // model_and_optim/, a DCP checkpoint
  torch_legacy,  // rank{r}.pt: rows of each tensor
  local,         // {model,optim,train}/rank{r}.pt: flat parameters of FSDP1
};
// OLMo's name, as above.
[[nodiscard]] std::string_view to_string(CheckpointerKind kind) noexcept;
// The checkpointer of this name, and the one whose files are of this kind; none: there is no such.
[[nodiscard]] std::optional<CheckpointerKind> checkpointer_named(std::string_view name) noexcept;
[[nodiscard]] std::optional<CheckpointerKind> checkpointer_of(CheckpointKind kind) noexcept;
// What saved the checkpoint there, by the names of its files, of which nodes with disks of their
// own may have some alone. Throws `not_found` if there is none, and `unsupported` if it is of no
// checkpointer.
[[nodiscard]] CheckpointerKind checkpointer_of(const Location& path);
// The same by rank 0, for all. Collective.
[[nodiscard]] CheckpointerKind checkpointer_of(const Location& path, Group& group);

struct CheckpointerOptions {
  bool save_overwrite = false;  // false: what is there is `already_exists`
  // Threads that read and write on each rank. Unset: the environment's OLMO_NUM_THREADS, else four
  // more than there are processors, 32 at most. Below 1 is `invalid_argument`.
  std::optional<int> thread_count = {};
  // The text of config.yaml. Saves write it last. Empty: a line that names the checkpointer.
  std::string config = {};
  // What every group of the optimizer gets beside the optimizer's own options, such as OLMo's
  // {"max_grad_norm": 1.0}. It wins over what was restored.
  Value group_options = Value::dict();
};

struct SaveCheckpointOptions {
  // A directory that gets a copy when the checkpoint is complete, see tessera/copy.h.
  std::optional<Location> upload_to = {};
};

struct RestoreOptions {
  // A directory with copies of some of the checkpoint's files, see tessera/copy.h.
  std::optional<Location> local_cache = {};
  bool load_optimizer_state = true;
  bool load_trainer_state = true;  // false: restore_checkpoint returns none
};

struct UnshardOptions {
  std::optional<Location> local_cache = {};
  bool load_optimizer_state = true;
  bool load_trainer_state = true;
  torch::Device device = torch::kCPU;  // of the tensors of the model and the optimizer
};
// A checkpoint in memory, as OLMo unshards it: whole tensors. `optim` of `local` goes by numbers.
struct UnshardedState {
  Value model;
  std::optional<Value> optim;
  std::optional<Value> trainer;  // rank 0's; of `torch_legacy` without "rng", as in OLMo
};

class Checkpointer {
 public:
  // `group` must outlive it. Throws `invalid_argument` for a number of threads below 1, and for a
  // `config` that names another sharded checkpointer, unless the kind is `full`.
  Checkpointer(CheckpointerKind kind, Group& group, CheckpointerOptions options = {});

  [[nodiscard]] CheckpointerKind kind() const noexcept { return kind_; }

  // Saves in one step: `dir` appears whole, or keeps what it had. Every rank gives its own trainer
  // state, a dict; of `full` rank 0's is saved. Groups of the optimizer get OLMo's keys
  // `param_names`, `sharded`, `max_grad_norm` and `max_grad_norm_ratio`, and the keys of the groups
  // restored last that this optimizer does not know. Their parameters stand in the order that was
  // restored, else sorted as OLMo sorts them: by it `local` numbers them. Throws what save() and
  // upload() throw, and `unsupported` for `local` and a model with anything that is in no flat
  // parameter of FSDP1. Collective.
  SaveResult save_checkpoint(const Location& dir, ModuleRef model, OptimizerRef optim,
                             const Value& trainer_state, const SaveCheckpointOptions& options = {});

  // Fills the model and the optimizer, and returns the trainer state, as trainer_state() of
  // tessera/stateful.h says; none if there is none. Of `full` ranks above 0 get an "rng" that
  // derived_random_state() of tessera/checkpointer.h makes of rank 0's, with a warning.
  //
  // Parameters are found by names, and groups by the names in them: tessera/restore.h has the
  // rules. Throws `invalid_argument` for a checkpoint of another kind and for a config.yaml that
  // names another sharded checkpointer, `mismatch` for another model or other groups, `incomplete`
  // if a rank's trainer state is missing, and what load() throws, before anything is changed. A
  // failure after that leaves no values in them, as spoiled() of tessera/restore.h. Collective.
  Value restore_checkpoint(const Location& path, ModuleRef model, OptimizerRef optim,
                           const RestoreOptions& options = {});

  // Whole tensors of a checkpoint of this kind, in memory. For one process; needs no ranks.
  [[nodiscard]] UnshardedState unshard_checkpoint(const Location& path,
                                                  const UnshardOptions& options = {}) const;
  // The same as a checkpoint of kind `full` at `target`, streamed in bounded memory; `device` has
  // no effect.
  ConvertReport unshard_checkpoint(const Location& path, const Location& target,
                                   const UnshardOptions& options) const;

 private:
  [[nodiscard]] LoadOptions load_options() const;
  CheckpointerKind kind_;
  Group& group_;
  CheckpointerOptions options_;
  int threads_;
  // Options of each group that the last restore found and the optimizer does not know.
  Value::List restored_groups_;
  Value::List restored_orders_;  // the names of each stored group
};

// The checkpointer that a run's configuration names: `torch_new`, `torch_legacy` or `local`.
// Without a name that of `options.config` counts. Throws `unsupported` for `olmo_core`, and
// `invalid_argument` for any other name and for none.
[[nodiscard]] Checkpointer build_sharded_checkpointer(std::string_view name, Group& group,
                                                      const CheckpointerOptions& options = {});

// OLMo's functions beside its checkpointers: parts of a checkpoint, and single files of it.

struct StateSaveOptions {
  bool save_overwrite = false;  // false: what is there is `already_exists`
  // A directory that gets a copy when all is saved here, see tessera/copy.h.
  std::optional<Location> upload_to = {};
};
struct StateLoadOptions {
  bool load_optimizer_state = true;
  // A directory with copies of some of the files, see tessera/copy.h.
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

// The states of random number generators, as trainers keep them in checkpoints.
//
//   trainer.set_item("rng", random_state());
//   ...
//   set_random_state(trainer.at("rng"));
//
// Every rank has its own: in a TrainingState it belongs into `rank_values`.

// A dict with "torch", the state of libtorch's default generator on the CPU, and "cuda", that of
// the current CUDA device: tensors of uint8 with the bytes that Python's torch.get_rng_state() and
// torch.cuda.get_rng_state() give. Where there is no CUDA device, "cuda" has no elements. Other
// entries of `before`, such as Python's own "python" and "numpy", come first and stay as they are.
[[nodiscard]] Value random_state(const Value& before = Value::dict());

// Sets the generators from such a dict. Entries that it lacks change nothing, and neither does
// "cuda" if it has no elements or this process no CUDA device. Throws `mismatch` for anything but
// tensors of uint8 in memory, and `corrupt` for bytes that are no generator's state.
void set_random_state(const Value& state);

// A state for rank `rank` where a checkpoint has rank 0's alone. The generator of the CPU gets the
// seed CRC-32(bytes of rank 0's state, then the rank as four bytes, lowest first), the generator of
// CUDA the same of its own state. So no two ranks get the same seed, and every restore of the
// checkpoint gives the same ones. Entries of other generators are left out: only their owners can
// derive states. Rank 0 keeps the state as it is. Throws as set_random_state.
[[nodiscard]] Value derived_random_state(const Value& state, int rank);

}  // namespace tessera
