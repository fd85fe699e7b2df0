// A small model on the same ranks as another one: its steps come between those of the other.
#pragma once

#include <torch/torch.h>

#include <memory>

#include "generated/case.h"
#include "tessera/mesh.h"

namespace tessera::generated {

class SecondModel {
 public:
  // Sharded in the style of `layout`.
  SecondModel(const Layout& layout, Mesh& mesh);
  // One step. False: the parameters are not those of one process with all ranks' batches.
  [[nodiscard]] bool train(int number);

 private:
  [[nodiscard]] torch::Tensor batch_of(int number, int rank) const;

  Mesh& mesh_;
  torch::nn::Linear alone_, shared_;
  std::unique_ptr<torch::optim::Optimizer> of_alone_, of_shared_;
};

}  // namespace tessera::generated
