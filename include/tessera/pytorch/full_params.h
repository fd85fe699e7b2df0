// Whole parameters of a sharded model: to look at, to change, to save in one piece.
//
//   {
//     FullParams whole(model);                    // collective
//     model->embed->weight.normal_(0, 0.02);      // each rank keeps its own part of the change
//   }                                             // local
//   auto state = full_state_dict(model, {.rank0_only = true});
//
// In the parameters' own dtype, whatever mixed precision computes in. Not between a forward and its
// backward.
#pragma once

#include <torch/ordered_dict.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/module_ref.h"

namespace tessera {

// Arguments of PyTorch's summon_full_params.
struct FullParamsOptions {
  bool recurse = true;      // units below the module's own too
  bool writeback = true;    // changes are kept: by each rank those of what it holds
  bool rank0_only = false;  // on other ranks parameters stay without data; needs writeback = false
  bool offload_to_cpu = false;
  bool with_grads = false;  // gradients too: a parameter that no rank has one for has none
};

// Within its life the parameters of the units at and below `module` have all their data; what
// unshard() gathered is freed afterwards. Parameters that stay where they are (`replicate`) have it
// anyway, and changes to them always last. Throws
// `invalid_argument` in forward or backward, inside another one's life, for `writeback` with
// `rank0_only`. Collective.
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

// Parameters and buffers as Python's state_dict() of the module without sharding has them: names,
// order, copies of the values; what modules share stands under each of its names. One unit at a
// time is gathered. Collective.
using FullState = torch::OrderedDict<std::string, torch::Tensor>;
[[nodiscard]] FullState full_state_dict(ModuleRef module, const FullStateOptions& options = {});
// The reverse: every rank gives the whole dict and takes its own part. Throws `mismatch` naming a
// parameter or buffer that is missing, too many, or of another shape; then nothing was changed.
// Local.
void load_full_state_dict(ModuleRef module, const FullState& state);

}  // namespace tessera
