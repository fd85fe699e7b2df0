// One rank of scaled steps beside PyTorch's: prints after each update what the scaler holds.
//   grad_scaler_steps DIR
// DIR/start.pt holds {"scaler": the state to begin with}, DIR/gradients float32 [steps, world,
// elements]: the scaled gradients of this rank's parameters, one after the other. DIR/new_scales
// has a line a step: a number for update(), 0 for none. Writes DIR/ours.RANK and, as a checkpoint,
// DIR/end.
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/grad_scaler.h"

namespace {

struct Parameter {
  std::int64_t size;
  at::ScalarType type;
};
const std::vector<Parameter> kParameters = {
    {3, at::kFloat}, {0, at::kFloat}, {5, at::kHalf}, {4, at::kBFloat16}};
constexpr std::int64_t kElements = 12;

void take_steps(const std::string& directory, const tessera::Mesh& mesh) {
  tessera::ShardedGradScaler scaler(mesh);
  auto state = tessera::Value::dict({{"scaler", scaler.state_dict()}});
  tessera::load(state, directory + "/start.pt", mesh.checkpoint_group());
  scaler.load_state_dict(state.at("scaler"));

  std::vector<torch::Tensor> parameters;
  for (const auto& parameter : kParameters) {
    parameters.push_back(torch::ones({parameter.size}, parameter.type).requires_grad_());
  }
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.25));

  std::ifstream gradients(directory + "/gradients", std::ios::binary);
  std::ifstream new_scales(directory + "/new_scales");
  std::FILE* out = std::fopen((directory + "/ours." + std::to_string(mesh.rank())).c_str(), "w");
  double new_scale = 0;
  while (new_scales >> new_scale) {
    auto all = torch::empty({mesh.size(), kElements});
    gradients.read(static_cast<char*>(all.mutable_data_ptr()),
                   static_cast<std::streamsize>(all.nbytes()));
    if (!gradients) {
      throw tessera::Error(tessera::ErrorCode::incomplete, "the input file is too short");
    }
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto size = kParameters[i].size;
      parameters[i].mutable_grad() =
          all[mesh.rank()].narrow(0, begin, size).to(kParameters[i].type);
      begin += size;
    }
    const double loss = scaler.scale(torch::full({1}, 3, at::kHalf)).item<double>();
    scaler.step(optimizer);
    scaler.update(new_scale > 0 ? std::optional(new_scale) : std::nullopt);
    const auto tracker = scaler.state_dict().at("_growth_tracker").as_int();
    std::fprintf(out, "%.9g %.9g %d", loss, scaler.get_scale(), static_cast<int>(tracker));
    for (const auto& parameter : parameters) {
      const auto values = parameter.detach().to(at::kFloat);
      for (std::int64_t i = 0; i < values.numel(); ++i) {
        std::fprintf(out, " %.9g", values[i].item<double>());
      }
    }
    std::fprintf(out, "\n");
  }
  std::fclose(out);
  tessera::save(tessera::Value::dict({{"scaler", scaler.state_dict()}}), directory + "/end",
                mesh.checkpoint_group());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    torch::set_num_threads(1);
    take_steps(argv[argc - 1], tessera::Mesh::from_environment());
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
