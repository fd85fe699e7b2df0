// A legacy checkpoint of OLMo by many ranks, restored by a few and unsharded through the API.
//
//   bench_legacy restore DIRECTORY            under torchrun
//   bench_legacy unshard DIRECTORY TARGET     one process
//
// The model is made of the names and shapes in the checkpoint, as one unit of fully_shard; its
// optimizer has no state yet. Prints one line of JSON, by rank 0: seconds of the slowest rank.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/checkpointer.h"
#include "tessera/fsdp.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"

namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A module of the names that a state dict has.
struct Node : torch::nn::Module {
  torch::Tensor forward(torch::Tensor input) { return input; }

  void add(const std::string& name, const tessera::Shape& shape) {
    const auto dot = name.find('.');
    if (dot == std::string::npos) {
      register_parameter(name, torch::zeros(shape));
      return;
    }
    auto& child = children_[name.substr(0, dot)];
    if (!child) child = register_module(name.substr(0, dot), std::make_shared<Node>());
    child->add(name.substr(dot + 1), shape);
  }

 private:
  std::map<std::string, std::shared_ptr<Node>> children_;
};

std::shared_ptr<Node> model_in(const std::string& directory) {
  constexpr std::string_view kModel = "model.";
  auto model = std::make_shared<Node>();
  for (const auto& leaf : tessera::Checkpoint::open(directory).leaves) {
    if (leaf.name.starts_with(kModel))
      model->add(leaf.name.substr(kModel.size()), leaf.value.as_tensor().shape);
  }
  return model;
}

tessera::Checkpointer checkpointer(tessera::Group& group) {
  tessera::CheckpointerOptions options;
  options.thread_count = 2;
  return {tessera::CheckpointerKind::torch_legacy, group, options};
}

void restore(const std::string& directory) {
  tessera::MeshOptions on_cpu;
  on_cpu.device = torch::kCPU;
  auto mesh = tessera::Mesh::from_environment(on_cpu);
  const auto model = model_in(directory);
  tessera::fully_shard(model, mesh);
  tessera::AdamW optimizer(tessera::sharded_parameters(model));
  auto& group = mesh.checkpoint_group();
  group.barrier();
  const auto begin = Clock::now();
  (void)checkpointer(group).restore_checkpoint(directory, model, optimizer);
  group.barrier();
  if (mesh.rank() == 0) std::printf("{\"seconds\": %.4f}\n", since(begin));
}

void unshard(const std::string& directory, const std::string& target) {
  const auto group = tessera::solo_group();
  const auto begin = Clock::now();
  (void)checkpointer(*group).unshard_checkpoint(directory, target, {});
  std::printf("{\"seconds\": %.4f}\n", since(begin));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string job = argc > 1 ? argv[1] : "";
  try {
    at::set_num_threads(1);
    if (job == "restore" && argc == 3) {
      restore(argv[2]);
    } else if (job == "unshard" && argc == 4) {
      unshard(argv[2], argv[3]);
    } else {
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_legacy: %s\n", error.what());
    return 1;
  }
  return 0;
}
