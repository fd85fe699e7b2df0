// The archives of a local checkpoint: FSDP1's flat parameters and their optimizer state
// (checkpoint-rows F-05, O-70 to O-72).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/write/write_olmo.h"

namespace tessera {

// How parameters become flat ones.
struct FlatRules {
  int shards = 1;       // of each flat parameter
  bool aligned = true;  // as use_orig_params
  std::optional<DType> aligned_as = {};
};

// Makes the archives of any shard; nothing is read for that but optimizer state that is not cut.
class LocalArchives {
 public:
  // `state` and `sources` outlive this. Throws what of the state cannot be in flat parameters.
  LocalArchives(const OlmoState& state, const SourceTensors& sources, UnitPlan plan,
                const FlatRules& rules);
  ~LocalArchives();

  // With the flat parameters' shards of number `shard`.
  [[nodiscard]] Archive model(std::string file, int shard) const;
  // The optimizer's part, if the state has one.
  [[nodiscard]] Archive optim(std::string file, int shard) const;

 private:
  struct Plan;
  const OlmoState& state_;
  const SourceTensors& sources_;
  std::unique_ptr<Plan> plan_;
};

// The names in a model state dict. Throws `unsupported` for what is no tensor.
[[nodiscard]] std::vector<std::string> names_in_flat_model(const Value& state_dict);

}  // namespace tessera
