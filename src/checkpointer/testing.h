// The model of tests/golden's trainings, and ways to shard it.
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "conformance/temporary_directory.h"
#include "optim_state/testing.h"
#include "tessera/checkpointer.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "torch/testing.h"

namespace tessera::testing {

inline std::string golden_path(const std::string& name) {
  return std::string(TESSERA_TEST_DATA) + "/golden/" + name;
}

// A copy of PyTorch's files of one kind, without a trainer state. Its path.
inline std::string copied_golden(const TemporaryDirectory& directory, CheckpointerKind kind) {
  namespace fs = std::filesystem;
  const auto from = golden_path("fsdp1_uop1_ws2");
  const auto to = directory.path() + "/" + std::string(to_string(kind));
  fs::create_directory(to);
  const auto copy = [&](const std::string& name, const std::string& as) {
    fs::copy(from + name, to + as, fs::copy_options::recursive);
  };
  switch (kind) {
    case CheckpointerKind::full:
      copy("/model.pt", "/model.pt");
      copy("/optim.pt", "/optim.pt");
      break;
    case CheckpointerKind::torch_new:
      copy("/model_and_optim", "/model_and_optim");
      break;
    case CheckpointerKind::torch_legacy:
      copy("/legacy", "");
      break;
    case CheckpointerKind::local:
      copy("/local", "");
      break;
  }
  return to;
}

// Called through a holder, so that it can be a unit.
struct LayerImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
};
TESSERA_MODULE(Layer);

struct LayersImpl : torch::nn::Module {
  Layer l1{nullptr}, l2{nullptr};
  torch::nn::LayerNorm ln{nullptr};
  LayersImpl() {
    l1 = register_module("l1", Layer(3, 5));
    l2 = register_module("l2", Layer(5, 3));
    ln = register_module("ln", torch::nn::LayerNorm(torch::nn::LayerNormOptions({3})));
  }
  torch::Tensor forward(const torch::Tensor& x) { return ln(l2(torch::relu(l1(x)))); }
};
TESSERA_MODULE(Layers);

inline Layers make_layers(int seed = 3) {
  return with_values(Layers(), seed);
}

inline void shard_layers(Layers& layers, Way way, const Mesh& mesh) {
  if (way == Way::replicated) replicate(layers, mesh);
  if (way == Way::rows || way == Way::aligned) {
    const ShardOptions options{.layout = way == Way::rows ? ShardLayout::rows : ShardLayout::flat};
    fully_shard(layers->l1, mesh, options);
    fully_shard(layers->l2, mesh, options);
    fully_shard(layers, mesh, options);
  }
  if (way == Way::flat || way == Way::original) {
    const FullyShardedDataParallel<Layers> model(
        layers, mesh,
        {.auto_wrap_policy = module_wrap_policy<LayerImpl>(),
         .use_orig_params = way == Way::original});
  }
}

// Steps `first` and those behind it, `count` in all. All ranks learn from the same rows. Returns
// the last loss.
inline double train_layers(Layers& layers, AdamW& adam, int first, int count) {
  double last = 0;
  for (int step = first; step < first + count; ++step) {
    adam.zero_grad();
    const auto rows = torch::arange(6).to(torch::kFloat).view({2, 3});
    auto loss = (layers(rows + step) - rows.cos()).square().mean();
    loss.backward();
    last = loss.item<double>();
    adam.step();
  }
  return last;
}

// Copies the files that rank `rank` has saved, and those that are everybody's. Returns `to`.
inline std::string files_of_rank(const std::string& all, const std::string& to, int rank) {
  namespace fs = std::filesystem;
  const auto own = "rank" + std::to_string(rank) + ".pt";
  for (const auto& entry : fs::recursive_directory_iterator(all)) {
    const auto name = entry.path().filename().string();
    if (!entry.is_regular_file() || (name.starts_with("rank") && name != own)) continue;
    const auto target = fs::path(to) / fs::relative(entry.path(), all);
    fs::create_directories(target.parent_path());
    fs::copy_file(entry.path(), target);
  }
  return to;
}

}  // namespace tessera::testing
