// Trainings of OLMo's model with Tessera's checkpointers: the counterpart of olmo_fsdp.py.
//
//   torchrun --no-python --nproc-per-node N checkpointer_tool JOBS.json
//
// JOBS.json is a list of trainings that run one after another, each in a new model:
//
//   {"config": FILE, "steps": N, "batches": FILE, "losses": FILE.csv,
//    "wrap": "fsdp1" | "fsdp1_flat" | "fsdp2" | "ddp" | "none", "copies": N,
//    "load": [KIND, DIRECTORY],
//    "saves": {STEP: [[KIND, DIRECTORY], ...]}}
//
// Only `config` and `steps` have to be there. The configuration is a TrainConfig of OLMo's.
// `batches` are the tokens of steps 1, 2, ...: int64, [step][sequence of the global batch][time].
// Rank r of N takes every N-th sequence from r on, as OLMo does. `copies` are those of a hybrid
// mesh. With `saves` of the step that was loaded nothing is trained before.
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "parity/olmo_training.h"
#include "tessera/mesh.h"

namespace {

using nlohmann::json;
using tessera::testing::Training;

void train(const json& job, tessera::Mesh& mesh) {
  Training training(job, mesh);
  std::string rows = "step,loss,lr,grad_norm\n";
  const auto save = [&] {
    const auto saves = job.value("saves", json::object());
    for (const auto& one : saves.value(std::to_string(training.step_count()), json::array()))
      training.save(one[0], one[1]);
  };
  save();
  while (training.step_count() < job.at("steps").get<std::int64_t>()) {
    rows += training.step() + "\n";
    save();
  }
  if (mesh.rank() == 0 && job.contains("losses"))
    std::ofstream(job["losses"].get<std::string>()) << rows;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: checkpointer_tool JOBS.json\n");
    return 2;
  }
  try {
    at::set_num_threads(1);
    tessera::MeshOptions options;
    options.device = torch::kCPU;
    auto mesh = tessera::Mesh::from_environment(options);
    for (const auto& job : json::parse(tessera::testing::text_of(argv[1]))) train(job, mesh);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "checkpointer_tool: %s\n", error.what());
    return 1;
  }
  return 0;
}
