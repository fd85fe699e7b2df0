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
#pragma once

#include <torch/ordered_dict.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/module_ref.h"

namespace [[gnu::visibility("default")]] tessera {

// Arguments of PyTorch's summon_full_params.
struct FullParamsOptions {
  bool recurse = true;      // also units below the module's own
  bool writeback = true;    // keep changes: each rank keeps those of what it holds
  bool rank0_only = false;  // other ranks' parameters stay without data; needs writeback = false
  bool offload_to_cpu = false;
  bool with_grads = false;  // averaged gradients too; a parameter without one on any rank has none
};

// While it lives, the parameters of the units at and below `module` have all their data. What
// unshard() gathered is freed afterwards. Parameters that stay in place (`replicate`) always have
// their data, and changes to them always last. Throws `invalid_argument` in a forward or backward,
// while another one lives, and for `writeback` with `rank0_only`. Collective.
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

}  // namespace tessera
