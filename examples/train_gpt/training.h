// A model, its optimizer and the ranks that share them: one step, one validation, one sample.
//
// A step's global batch is cut over the ranks and then into micro-batches. Each window's loss is
// divided by the size of the global batch, so neither cut changes what is computed, also where it
// is uneven.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data.h"
#include "model.h"
#include "options.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"

struct StepResult {
  double loss = 0;       // mean over the global batch, before the update
  double grad_norm = 0;  // before clipping; 0 without clipping
};

class Training {
 public:
  // Builds the model and, as the options say, shards it over `mesh`. Collective.
  Training(const Options& options, const tessera::Mesh& mesh);

  // The members below are collective too.
  StepResult step(const Text& text, std::int64_t done, double lr);
  double validate(const Text& text);
  // `count` bytes that the model goes on with after a line's end.
  std::string sample(std::int64_t count);

  // Forward of one batch [batch, time + 1] and the summed loss of its predictions.
  torch::Tensor loss_sum(const torch::Tensor& windows);

  Gpt& model() { return model_; }
  [[nodiscard]] const Gpt& model() const { return model_; }
  tessera::AdamW& optimizer() { return optimizer_; }
  // Parameters are freed after forward: FSDP1 leaves those of one rank alone in their place.
  [[nodiscard]] bool is_sharded() const {
    return options_.sharding == Sharding::fsdp2 ||
           (options_.sharding == Sharding::fsdp1 && mesh_.size() > 1);
  }
  // Names of the parameters of each of the optimizer's groups.
  using Groups = std::vector<std::vector<std::string>>;
  // A new optimizer whose groups hold these parameters. Throws `mismatch` when that is not each
  // parameter once.
  void regroup(const Groups& groups);

 private:
  torch::Tensor logits(const torch::Tensor& bytes);

  Options options_;
  tessera::Mesh mesh_;
  Gpt model_;
  std::vector<tessera::ShardedParameter> parameters_;
  tessera::AdamW optimizer_;
};
