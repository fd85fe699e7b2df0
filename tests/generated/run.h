// Carries out a case: in one process, which is what is expected, and on ranks that are threads.
#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "generated/model.h"
#include "tessera/optim.h"
#include "tessera/optimizer_ref.h"

namespace tessera::generated {

constexpr int kRows = 2;  // of a rank in a step

using Values = std::map<std::string, torch::Tensor>;  // by every name

struct StepResult {
  std::vector<double> losses;  // of each rank
  double norm = 0;             // before clipping; 0: nothing was clipped
  Values parameters;           // after the step
};
using PhaseResult = std::vector<StepResult>;

// What the rank that differs does in this step; nothing in other steps and on other ranks.
[[nodiscard]] Odd odd_of(const Case& drawn, int phase, int step, int rank);
[[nodiscard]] Route route_of(const Case& drawn, int phase, int step, int rank, int micro);
[[nodiscard]] int rows_of(const Case& drawn, int phase, int step, int rank);
[[nodiscard]] inline int batch_number(int phase, int step) {
  return phase * 50 + step;
}
[[nodiscard]] double norm_type(const Step& step);

[[nodiscard]] std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    OptimizerKind kind, const std::vector<torch::Tensor>& parameters);
[[nodiscard]] AdamWOptions own_adamw_options();

// One process that has all ranks' batches.
[[nodiscard]] std::vector<PhaseResult> run_plain(const Case& drawn);

// How a rank ended.
struct Outcome {
  enum class Kind { finished, left, differs, failed_as_meant, error, other_exception };
  Kind kind = Kind::finished;
  std::string text;
};
// The outcomes of the ranks of the phase that was the last to run. `directory` is for checkpoints.
[[nodiscard]] std::vector<Outcome> run_sharded(const Case& drawn,
                                               const std::vector<PhaseResult>& expected,
                                               const std::string& directory);

// What is wrong with a case, one line; empty: nothing. `note` says how a rank that differs ended.
struct Verdict {
  std::string failure, note;
};
[[nodiscard]] Verdict verdict_of(const Case& drawn, const std::string& directory);

}  // namespace tessera::generated
