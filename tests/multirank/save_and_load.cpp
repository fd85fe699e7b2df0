// One rank that saves a small tree with the others, loads it and compares.
//   RANK=0 WORLD_SIZE=4 MASTER_ADDR=10.17.0.1 MASTER_PORT=29500 save_and_load DIR
// Prints the name of the backend, "writes" when it begins to write data, and "loaded"; exits with 3
// and the error on stderr.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "torch/tensor.h"

namespace {

struct State {
  torch::Tensor rows;     // of this rank
  torch::Tensor replica;  // the same on all ranks
  tessera::Value tree;    // over their memory, and one value
};

// `sign`: 1 counts up, -1 down.
State state_of(const tessera::Mesh& mesh, int sign) {
  const tessera::Shape shape{2 * mesh.size() - 1, 3};  // the last rank has one row, others two
  const std::int64_t begin = 2 * mesh.rank(), end = std::min(begin + 2, shape[0]);
  State state;
  state.rows = sign * torch::arange(3 * begin, 3 * end, torch::kFloat).view({-1, 3});
  state.replica = sign * torch::arange(5, 16, torch::kFloat);
  auto sharded = tessera::sharded_leaf_of(state.rows, shape, begin);
  sharded.placement = tessera::Placement{.parts = mesh.size()};
  auto whole = tessera::leaf_of(state.replica);
  whole.placement = tessera::Placement{};
  state.tree = tessera::Value::dict(
      {{"rows", std::move(sharded)}, {"replica", std::move(whole)}, {"step", sign * 7}});
  return state;
}

void save_and_load(const std::string& directory) {
  tessera::MeshOptions options;
  options.deadline = std::chrono::seconds(60);
  options.device = torch::kCPU;
  const auto mesh = tessera::Mesh::from_environment(options);
  std::printf("%s\n", mesh.process_group()->getDefaultBackend()->getBackendName().c_str());
  const State saved = state_of(mesh, 1);
  bool writes = false;
  const auto tell = [&](const tessera::Progress&) {
    if (!std::exchange(writes, true)) std::printf("writes\n");
  };
  tessera::save(saved.tree, directory, {.progress = tell}, mesh.checkpoint_group());
  State loaded = state_of(mesh, -1);
  tessera::load(loaded.tree, directory, mesh.checkpoint_group());
  if (!torch::equal(loaded.rows, saved.rows) || !torch::equal(loaded.replica, saved.replica) ||
      loaded.tree.at("step") != saved.tree.at("step"))
    throw tessera::Error(tessera::ErrorCode::corrupt, "what was loaded differs");
  std::printf("loaded\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: save_and_load DIR\n");
    return 2;
  }
  try {
    torch::set_num_threads(1);
    save_and_load(argv[1]);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
