// The models of generated trainings: one class for every kind of block, so that all are called and
// sharded alike.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

#include "generated/case.h"
#include "tessera/ddp.h"
#include "tessera/fsdp.h"

namespace tessera::generated {

constexpr std::int64_t kPositions = 3;
constexpr std::int64_t kOutputs = 3;
constexpr std::int64_t kExperts = 3;

// The step and the rank of a forward, and what it does differently; -1: nothing.
struct Route {
  int step = 0;
  int rank = 0;
  int skip = -1;   // this block is not called
  int swap = -1;   // this one after the next one
  int again = -1;  // this one once more
  int throw_forward = -1;
  int throw_backward = -1;
  int changes = -1;  // an activation checkpoint around it gives something else again
  // throw_backward does so while it is true, and makes it false.
  std::shared_ptr<bool> throw_once = {};
  bool throw_inside = false;  // of blocks that can
  bool catches = false;       // the root goes on without the block that threw
  bool plain = false;         // no activation checkpoints: in the process that others are judged by
};

class BlockImpl : public torch::nn::Module {
 public:
  // [rows, kPositions, width] to the same.
  virtual torch::Tensor forward(const torch::Tensor& x, const Route& route) = 0;
};
using BlockPointer = std::shared_ptr<BlockImpl>;
// A block of the kinds that only pairs of features have.
[[nodiscard]] BlockPointer make_feature_block(BlockKind kind, int width);

class RootImpl : public torch::nn::Module {
 public:
  RootImpl(const Case& drawn, int width);
  // [rows, kPositions, width] to [rows, kPositions, kOutputs].
  torch::Tensor forward(torch::Tensor x, const Route& route);
  [[nodiscard]] const std::vector<BlockPointer>& blocks() const { return blocks_; }

 private:
  torch::Tensor run(int block, const torch::Tensor& x, const Route& route);
  torch::Tensor once(int block, const torch::Tensor& x, const Route& route);
  torch::Tensor all(torch::Tensor x, const Route& route);

  std::vector<Block> drawn_;
  bool checkpoint_all_;
  torch::nn::Linear in_{nullptr}, out_{nullptr};
  std::vector<BlockPointer> blocks_;
};
TESSERA_MODULE(Root);

// With values that the seed says, frozen as drawn, in the type of the case.
[[nodiscard]] Root make_root(const Case& drawn, int width);

// The parameters, each once, with the first of its names.
struct Named {
  std::string name;
  torch::Tensor tensor;
};
[[nodiscard]] std::vector<Named> own_parameters(const torch::nn::Module& module);
[[nodiscard]] std::vector<Named> block_parameters(const RootImpl& root, int block);

// A rank's batch: inputs and targets, which carry the type of `like`.
struct Batch {
  torch::Tensor input, target;
};
[[nodiscard]] Batch batch_of(const Case& drawn, int step, int micro, int rank, int rows);
// The loss of the output that `call` makes of the input, or of what the step makes of its gradient.
[[nodiscard]] torch::Tensor loss_of(
    const std::function<torch::Tensor(const torch::Tensor& input)>& call, const Batch& batch,
    Extra extra = Extra::nothing);

// Sharding ---------------------------------------------------------------------------------------

// `other_unit`: this block is no unit although the layout says so, or the reverse; -1: none.
void shard(Root& root, const Case& drawn, const Layout& layout, const Mesh& mesh,
           int other_unit = -1);
// Modules that become units, outermost first, without the root.
[[nodiscard]] std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> units_of(
    const RootImpl& root, const Case& drawn, const Layout& layout);

}  // namespace tessera::generated
