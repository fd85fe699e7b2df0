// How long do the functions on FSDP1's optimizer state take? Started by torchrun --no-python,
// beside bench/peers/optim_state.py, which does the same: rank 0 prints one line a round.
//   bench_optim_state wide|small flat|original ROUNDS
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "measure.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/optim_state_dict.h"

namespace {

using tessera::Value;
using tessera::bench::now;
using tessera::bench::peak_memory;

struct BlockImpl : torch::nn::Module {
  BlockImpl(int count, std::int64_t size) {
    for (int i = 0; i < count; ++i)
      register_parameter("p" + std::to_string(i), torch::ones({size, size}));
  }
  torch::Tensor forward(torch::Tensor x) { return x; }
};
TESSERA_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  // 10 units of a million elements, or 100 units of 100 small parameters.
  explicit ModelImpl(bool is_wide) {
    for (int i = 0; i < (is_wide ? 10 : 100); ++i)
      register_module("b" + std::to_string(i), is_wide ? Block(1, 1000) : Block(100, 8));
  }
  torch::Tensor forward(torch::Tensor x) { return x; }
};
TESSERA_MODULE(Model);

double seconds(const tessera::Mesh& mesh, const std::function<void()>& work) {
  mesh.group().barrier();
  const auto begin = now();
  work();
  mesh.group().barrier();
  return now() - begin;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  at::set_num_threads(1);
  const auto mesh = tessera::Mesh::from_environment();
  Model model(std::string(argv[1]) == "wide");
  const tessera::FullyShardedDataParallel<Model> sharded(
      model, mesh,
      {.auto_wrap_policy = tessera::module_wrap_policy<BlockImpl>(),
       .use_orig_params = std::string(argv[2]) == "original"});
  torch::optim::Adam optimizer(tessera::local_tensors(sharded.parameters()));
  for (const auto& parameter : optimizer.param_groups()[0].params()) {
    if (parameter.numel() > 0) parameter.mutable_grad() = torch::ones_like(parameter);
  }
  optimizer.step();
  const auto at_rest = peak_memory();
  // What touches memory for the first time is not timed.
  tessera::load_optimizer_state_dict(
      optimizer, tessera::shard_full_optim_state_dict(
                     tessera::full_optim_state_dict(model, optimizer, {.rank0_only = false}), model,
                     {.optim = tessera::OptimizerRef(optimizer)}));
  for (int round = 0; round < std::atoi(argv[3]); ++round) {
    Value full, chunks;
    const double full_save = seconds(mesh, [&] {
      full = tessera::full_optim_state_dict(model, optimizer, {.rank0_only = false});
    });
    const double full_load = seconds(mesh, [&] {
      tessera::load_optimizer_state_dict(
          optimizer,
          tessera::shard_full_optim_state_dict(full, model,
                                               {.optim = tessera::OptimizerRef(optimizer)}),
          /*keep=*/true);
    });
    full = Value();
    const double sharded_save =
        seconds(mesh, [&] { chunks = tessera::sharded_optim_state_dict(model, optimizer); });
    const double sharded_load = seconds(mesh, [&] {
      tessera::load_optimizer_state_dict(
          optimizer, tessera::flatten_sharded_optim_state_dict(chunks, model, optimizer),
          /*keep=*/true);
    });
    if (mesh.rank() == 0) {
      std::printf(
          "full_save %.5f full_load %.5f sharded_save %.5f sharded_load %.5f above_mb %ld peak_mb "
          "%ld\n",
          full_save, full_load, sharded_save, sharded_load, peak_memory() - at_rest, peak_memory());
    }
  }
}
