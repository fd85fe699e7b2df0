// The state of a sharded model in the kind that was chosen for it: FSDP1's state_dict_type.
//
//   const StateDictTypeScope scope(model, {.type = StateDictType::sharded});
//   Value state = state_dict(model);
//
// Training needs none of this: TrainingState of tessera/training_state.h saves and loads every
// rank's own parts without communication; full_state_dict of tessera/pytorch/full_params.h is the
// full kind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/module_ref.h"
#include "tessera/value.h"

namespace tessera {

namespace detail {
class Unit;
}  // namespace detail

enum class StateDictType : std::uint8_t {
  full,     // whole tensors under the module's own names
  local,    // a rank's part of each unit's flat parameter, without padding; FSDP1's units alone
  sharded,  // a chunk of each parameter's dimension 0, under the module's own names
};

// Of the optimizer's state, see tessera/pytorch/optim_state_dict.h.
struct OptimStateDictOptions {
  bool offload_to_cpu = true;
  bool rank0_only = false;  // as below
  bool operator==(const OptimStateDictOptions&) const = default;
};

// A kind with its options.
struct StateDictOptions {
  StateDictType type = StateDictType::full;
  bool offload_to_cpu = false;
  bool rank0_only = false;  // other ranks get an empty dict; of the full kind alone
  OptimStateDictOptions optim = {};
  bool operator==(const StateDictOptions&) const = default;
};

// From here on state_dict and load_state_dict of the units at and below `module` are of that kind.
// Throws `invalid_argument` for options that the kind does not have.
void set_state_dict_type(ModuleRef module, const StateDictOptions& options);
// Of the units at and below `module`; full when there are none. Throws `invalid_argument` when they
// differ.
[[nodiscard]] StateDictOptions get_state_dict_type(ModuleRef module);

// Within its life; afterwards every unit has the kind that it had, also after an exception.
class [[nodiscard]] StateDictTypeScope {
 public:
  StateDictTypeScope(ModuleRef module, const StateDictOptions& options);
  ~StateDictTypeScope();
  StateDictTypeScope(const StateDictTypeScope&) = delete;
  StateDictTypeScope& operator=(const StateDictTypeScope&) = delete;

 private:
  std::vector<std::pair<std::weak_ptr<detail::Unit>, StateDictOptions>> before_;
};

// {name: tensor}. Full: copies, one unit at a time is gathered; every rank has to call it, or the
// others wait until the deadline. Local: the shards' own memory. Sharded: chunk r of dimension 0,
// as torch.chunk cuts, on rank r, no piece where there is none; for FSDP1's units a copy, gathered
// unit by unit, for fully_shard's the shards' own memory. Buffers are as they are, in the full kind
// in their own dtype. Where nothing is sharded (NO_SHARD) every kind is the full one, with a
// warning. Throws `invalid_argument` for the local kind of units without a flat parameter.
// Collective for the full and, with FSDP1's units, the sharded kind.
[[nodiscard]] Value state_dict(ModuleRef module);
// The reverse, of the same kind and, but for the full one, from as many ranks: resharding goes
// through a checkpoint. Throws `mismatch` naming an entry that is missing, too many, or of another
// shape or part, on the other ranks `peer_failed`; then nothing was changed. Collective where
// state_dict is, but local for the full kind.
void load_state_dict(ModuleRef module, const Value& state);

// One rank's chunk of a tensor of the sharded kind: what Python's ShardMetadata says.
struct ShardMetadata {
  std::vector<std::int64_t> offsets, sizes;
  int rank = 0;  // of those that share the parameters
};
// The chunks of all `ranks` ranks of a tensor of `shape`; ranks without one are left out.
[[nodiscard]] std::vector<ShardMetadata> shard_metadata(const std::vector<std::int64_t>& shape,
                                                        int ranks);

}  // namespace tessera
