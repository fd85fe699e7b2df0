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
#include "tessera/fsdp.h"
#include "tessera/train_state.h"

namespace {

using tessera::Value;

struct ToyModelImpl : torch::nn::Module {
  torch::nn::Linear net1 = register_module("net1", torch::nn::Linear(16, 16));
  torch::nn::Linear net2 = register_module("net2", torch::nn::Linear(16, 8));
  torch::Tensor forward(const torch::Tensor& x) { return net2(torch::relu(net1(x))); }
};
TESSERA_MODULE(ToyModel);

// What of an application goes into a checkpoint.
struct AppState {
  ToyModel& model;
  tessera::AdamW& optimizer;

  [[nodiscard]] Value state() const {
    return Value::dict(
        {{"model", tessera::model_state(model)}, {"optim", tessera::optim_state(optimizer)}});
  }
  // A load has put the tensors in place; the options of the optimizer are left to do.
  void load(const Value& state) const { tessera::set_optim_state(optimizer, state.at("optim")); }
};

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

  const AppState app{model, optimizer};
  tessera::SaveOptions how;
  how.threads = 1;  // a data file for each writing thread
  tessera::save(Value::dict({{"app", app.state()}}), directory, mesh.group(), how);
}

// Loading needs the state of a fresh model first: it says which rows of which tensors this rank
// holds, and its memory is what is filled. The number of ranks may differ from that of the save.
void load(const std::string& directory, const std::string& again) {
  const auto mesh = tessera::Mesh::from_environment();
  torch::manual_seed(1);
  ToyModel model;
  tessera::AdamW optimizer = sharded_optimizer(model, mesh);

  const AppState app{model, optimizer};
  Value state = Value::dict({{"app", app.state()}});
  tessera::load(state, directory, mesh.group());
  app.load(state.at("app"));

  tessera::save(Value::dict({{"app", app.state()}}), again, mesh.group());
}

// One process, an ordinary model, no collectives. The keys are those of the save, so they start at
// "app".
void infer(const std::string& directory) {
  ToyModel model;
  Value state = Value::dict({{"app", Value::dict({{"model", tessera::model_state(model)}})}});
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
