// The state of a sharded model, in the kind that was chosen for it: FSDP1's state_dict_type.
//
//   const StateDictTypeScope scope(model, {.type = StateDictType::sharded});
//   Value state = state_dict(model);
//
// Training needs none of this. TrainingState of tessera/training_state.h saves and loads every
// rank's own parts without communication. full_state_dict of tessera/pytorch/state_dict.h gives
// the full kind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/ordered_dict.h>
#include <torch/types.h>

#include "tessera/parameter.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// Whole parameters of a sharded model: to look at them, change them, or save them in one piece.
//
//   {
//     FullParams whole(model);                    // collective
//     model->embed->weight.normal_(0, 0.02);      // each rank keeps its own part of the change
//   }                                             // local
//   auto state = full_state_dict(model, {.rank0_only = true});
//
// Parameters are in their own dtype, whatever mixed precision computes in. Do not ask for them
// between a forward and its backward.

// Arguments of PyTorch's summon_full_params.
struct FullParamsOptions {
  bool recurse = true;      // also units below the module's own
  bool writeback = true;    // keep changes: each rank keeps those of what it holds
  bool rank0_only = false;  // other ranks' parameters stay without data; needs writeback = false
  bool offload_to_cpu = false;
  bool with_grads = false;  // averaged gradients too; a parameter without one on any rank has none
};

// FullParams gives the parameters of the units at and below `module` all their data while it lives.
// What unshard() gathered is freed afterwards. Parameters that stay in place (`replicate`) always
// have their data, and changes to them always last. Throws `invalid_argument` in a forward or
// backward, while another one lives, and for `writeback` with `rank0_only`. Collective.
//
// What reads the model meanwhile (saves, state dicts, AdamW::step) has the changes. What changes
// this rank's shards meanwhile (loads, optimizers, `local`) lasts; the whole tensors show it after
// load_full_state_dict alone, and an element that was changed in both ways is the whole tensor's.
class [[nodiscard]] FullParams {
 public:
  explicit FullParams(ModuleRef module, const FullParamsOptions& options = {});
  ~FullParams();
  FullParams(const FullParams&) = delete;
  FullParams& operator=(const FullParams&) = delete;

 private:
  class Shown;
  std::vector<std::unique_ptr<Shown>> shown_;
};

struct FullStateOptions {
  bool rank0_only = false;  // other ranks get an empty dict
  bool offload_to_cpu = false;
};

// Parameters and buffers as Python's state_dict() has them for the module without sharding: its
// names, its order, copies of its values. A tensor that modules share is under each of its names.
// Buffers are this rank's own. One unit at a time is gathered. Collective.
using FullState = torch::OrderedDict<std::string, torch::Tensor>;
[[nodiscard]] FullState full_state_dict(ModuleRef module, const FullStateOptions& options = {});
// The reverse: every rank gives the whole dict and takes its own part. Throws `mismatch` naming a
// parameter or buffer that is missing, too many, or of another shape; then nothing was changed.
// Local.
void load_full_state_dict(ModuleRef module, const FullState& state);

namespace detail {
class Unit;
}  // namespace detail

enum class StateDictType : std::uint8_t {
  full,     // whole tensors under the module's own names
  local,    // a rank's part of each unit's flat parameter, without padding; only FSDP1's units
  sharded,  // a chunk of each parameter's dimension 0, under the module's own names
};

// Options for the optimizer's state, see tessera/pytorch/optim_state_dict.h.
struct OptimStateDictOptions {
  bool offload_to_cpu = true;
  bool rank0_only = false;  // as below
  bool operator==(const OptimStateDictOptions&) const = default;
};

// A kind with its options.
struct StateDictOptions {
  StateDictType type = StateDictType::full;
  bool offload_to_cpu = false;
  bool rank0_only = false;  // other ranks get an empty dict; only for the full kind
  OptimStateDictOptions optim = {};
  bool operator==(const StateDictOptions&) const = default;
};

// Sets the kind that state_dict and load_state_dict have from here on, for the units at and below
// `module`. Throws `invalid_argument` for options that the kind does not have.
void set_state_dict_type(ModuleRef module, const StateDictOptions& options);
// The kind of the units at and below `module`; full if there are none. Throws `invalid_argument` if
// they differ.
[[nodiscard]] StateDictOptions get_state_dict_type(ModuleRef module);

// Sets the kind while it lives. Afterwards every unit has its former kind, also after an exception.
class [[nodiscard]] StateDictTypeScope {
 public:
  StateDictTypeScope(ModuleRef module, const StateDictOptions& options);
  ~StateDictTypeScope();
  StateDictTypeScope(const StateDictTypeScope&) = delete;
  StateDictTypeScope& operator=(const StateDictTypeScope&) = delete;

 private:
  std::vector<std::pair<std::weak_ptr<detail::Unit>, StateDictOptions>> before_;
};

// Returns {name: tensor}. Full: copies, with one unit gathered at a time. Every rank must call it,
// or the others wait until the deadline. Local: the shards' own memory. Sharded: rank r has chunk r
// of dimension 0, cut as by torch.chunk, or no piece if there is no such chunk. With FSDP1's units
// it is a copy, gathered unit by unit; with fully_shard's units it is the shards' own memory.
// Buffers are as they are; in the full kind they have their own dtype. If nothing is sharded
// (NO_SHARD), every kind is the full one, with a warning. Throws `invalid_argument` for the local
// kind of units without a flat parameter. Collective for the full kind and, with FSDP1's units, for
// the sharded kind.
[[nodiscard]] Value state_dict(ModuleRef module);
// The reverse, with a state of the same kind. Except for the full kind it must come from as many
// ranks: resharding goes through a checkpoint. Throws `mismatch` naming an entry that is missing,
// too many, or of another shape or part, and `peer_failed` on the other ranks; then nothing was
// changed. Collective where state_dict is, but local for the full kind.
void load_state_dict(ModuleRef module, const Value& state);

// One rank's chunk of a tensor of the sharded kind, as in Python's ShardMetadata.
struct ShardMetadata {
  std::vector<std::int64_t> offsets, sizes;
  int rank = 0;  // among those that share the parameters
};
// The chunks of a tensor of `shape` on `ranks` ranks. Ranks without a chunk are left out.
[[nodiscard]] std::vector<ShardMetadata> shard_metadata(const std::vector<std::int64_t>& shape,
                                                        int ranks);

}  // namespace tessera
