// What the samples of the runtime's headers and of the documents take for granted: a model of
// blocks, its optimizer, a mesh and a batch.
#pragma once

#include <torch/torch.h>

#include <iostream>
#include <utility>
#include <vector>

#include "samples/given_core.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/checkpointer.h"
#include "tessera/collectives.h"
#include "tessera/ddp.h"
#include "tessera/deferred_init.h"
#include "tessera/distributed_sampler.h"
#include "tessera/fsdp.h"
#include "tessera/grad_scaler.h"
#include "tessera/lr_scheduler.h"
#include "tessera/norms.h"
#include "tessera/optim.h"
#include "tessera/optimizer_in_backward.h"
#include "tessera/optimizer_ref.h"
#include "tessera/pytorch/distributed_state_dict.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/pytorch/wrap_scope.h"
#include "tessera/snapshot.h"
#include "tessera/sync_batchnorm.h"
#include "tessera/tensor_value.h"
#include "tessera/trace.h"
#include "tessera/training_state.h"
#include "tessera/training_writer.h"
#include "tessera/unit_controls.h"

namespace given {

struct Config {};

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x);
};
TESSERA_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl() = default;
  explicit GptImpl(const Config& config);
  torch::Tensor forward(torch::Tensor tokens);
  std::vector<Block> blocks;
  torch::nn::Embedding embed{nullptr};
};
TESSERA_MODULE(Gpt);

// Of a program that was written for libtorch alone.
struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x);
};
TORCH_MODULE(Net);
struct PolicyImpl : torch::nn::Module {
  torch::Tensor act(const torch::Tensor& seen, bool explore);
};
TORCH_MODULE(Policy);

struct Output {
  torch::Tensor logits, hidden;
};

struct MyState : torch::optim::OptimizerCloneableParamState<MyState> {
  TORCH_ARG(std::int64_t, step);
  TORCH_ARG(torch::Tensor, momentum);
};
struct MyOptions : torch::optim::OptimizerCloneableOptions<MyOptions> {
  TORCH_ARG(double, lr);
};
struct MyOptimizer : torch::optim::Optimizer {};

extern Config config;
extern Mesh mesh;
extern Gpt model, gpt;
extern std::vector<Block> blocks;
extern AdamW optimizer;
extern torch::optim::AdamWOptions options;
extern std::vector<ShardedParameter> parameters;
extern std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;
extern Net net;
extern Policy policy;
extern torch::optim::AdamW adam;
extern c10::intrusive_ptr<c10d::Store> store;
extern c10::intrusive_ptr<c10d::Backend> backend;
extern int rank, world_size;
extern torch::Tensor input, target, loss, x, seen;
extern std::uint64_t seed;
extern std::int64_t step;
extern Value trainer;
extern std::string yaml;
extern double max_norm;

torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& target);
torch::Tensor loss_of(Gpt& model);
torch::Tensor loss_of(const torch::Tensor& output);
void train(int step);

}  // namespace given
