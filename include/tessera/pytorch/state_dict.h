// The state of a sharded model, in the kind that was chosen for it: FSDP1's state_dict_type.
//
//   const StateDictTypeScope scope(model, {.type = StateDictType::sharded});
//   Value state = state_dict(model);
//
// Training needs none of this. TrainingState of tessera/training_state.h saves and loads every
// rank's own parts without communication. full_state_dict of tessera/pytorch/full_params.h gives
// the full kind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/module_ref.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

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
