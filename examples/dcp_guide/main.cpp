// The guide "Distributed Checkpointing (DCP) for FSDP models", in C++.
//
//   torchrun --no-python --nproc-per-node 2 dcp_guide save checkpoint
//   torchrun --no-python --nproc-per-node 3 dcp_guide load checkpoint again
//   dcp_guide infer checkpoint                       no process group
//   dcp_guide convert checkpoint whole.pt back       to one torch.save file, and from it to a DCP
//   again
//
// Python reads what it saves and it reads what Python saves: examples/peers/dcp_guide.py is the
// same guide.
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/fsdp.h"
#include "tessera/training_state.h"

namespace {

struct ToyModelImpl : torch::nn::Module {
  torch::nn::Linear net1 = register_module("net1", torch::nn::Linear(16, 16));
  torch::nn::Linear net2 = register_module("net2", torch::nn::Linear(16, 8));
  torch::Tensor forward(const torch::Tensor& x) { return net2(torch::relu(net1(x))); }
};
TESSERA_MODULE(ToyModel);

// The guide keeps the state of its application under this key of the checkpoint.
constexpr const char* kApp = "app";

tessera::AdamW sharded_optimizer(ToyModel& model, const tessera::Mesh& mesh) {
  tessera::fully_shard(model, mesh);
  return tessera::AdamW(tessera::sharded_parameters(model), {.lr = 0.1});
}

// One step of training, then a checkpoint: a data file from each rank, and `.metadata`.
void save(const std::string& directory) {
  const auto mesh = tessera::Mesh::from_environment();
  torch::manual_seed(0);
  ToyModel model;
  tessera::AdamW optimizer = sharded_optimizer(model, mesh);
  model(torch::rand({8, 16})).sum().backward();
  optimizer.step();

  tessera::TrainingState state(model, optimizer);
  state.key = kApp;
  tessera::SaveOptions how;
  how.threads = 1;  // a data file for each writing thread
  tessera::save(state, directory, how, mesh.checkpoint_group());
}

// Loading fills the memory of a fresh model and its optimizer: the model says which rows of which
// tensors this rank holds. The number of ranks may differ from that of the save.
void load(const std::string& directory, const std::string& again) {
  const auto mesh = tessera::Mesh::from_environment();
  torch::manual_seed(1);
  ToyModel model;
  tessera::AdamW optimizer = sharded_optimizer(model, mesh);

  tessera::TrainingState state(model, optimizer);
  state.key = kApp;
  tessera::load(state, directory, mesh.checkpoint_group());
  tessera::save(state, again, mesh.checkpoint_group());
}

// One process, an ordinary model, no collectives.
void infer(const std::string& directory) {
  ToyModel model;
  tessera::TrainingState state(model);
  state.key = kApp;
  const auto alone = tessera::solo_group();
  tessera::load(state, directory, *alone);

  const torch::NoGradGuard no_grad;
  const auto output = model(torch::ones({1, 16}))[0];
  for (std::int64_t i = 0; i < output.size(0); ++i) std::printf("%.9g ", output[i].item<double>());
  std::printf("\n");
}

// Both directions, streamed: no tensor has to fit into memory, no model is needed.
void convert(const std::string& directory, const std::string& file, const std::string& back) {
  tessera::ConvertOptions how;
  how.to = tessera::CheckpointKind::torch_file;
  tessera::convert(directory, file, how);
  how.to = tessera::CheckpointKind::dcp;
  tessera::convert(file, back, how);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string command = words.empty() ? "" : words[0];
  try {
    if (command == "save" && words.size() == 2) {
      save(words[1]);
    } else if (command == "load" && words.size() == 3) {
      load(words[1], words[2]);
    } else if (command == "infer" && words.size() == 2) {
      infer(words[1]);
    } else if (command == "convert" && words.size() == 4) {
      convert(words[1], words[2], words[3]);
    } else {
      std::fputs(
          "usage: dcp_guide save DIR | load DIR AGAIN | infer DIR | convert DIR FILE.pt BACK\n",
          stderr);
      return 2;
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dcp_guide: %s\n", error.what());
    return 3;
  }
}
