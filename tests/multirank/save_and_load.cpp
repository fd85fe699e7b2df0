// One rank that saves a small tree with the others, loads it and compares.
//   RANK=0 WORLD_SIZE=4 MASTER_ADDR=10.17.0.1 MASTER_PORT=29500 save_and_load DIR
// Prints the name of the backend, "writes" when it begins to write data, and "loaded"; exits with 3
// and the error on stderr.
//   ... save_and_load DIR olmo
// saves a small training state as DIR/KIND for each of OLMo's kinds, and prints for each a line:
// "KIND saved", behind it "loaded" if the same came back, or the error.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layout/boxes.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/restore.h"
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

tessera::Mesh mesh_of_environment() {
  tessera::MeshOptions options;
  options.deadline = std::chrono::seconds(60);
  options.device = torch::kCPU;
  auto mesh = tessera::Mesh::from_environment(options);
  std::printf("%s\n", mesh.process_group()->getDefaultBackend()->getBackendName().c_str());
  return mesh;
}

void save_and_load(const std::string& directory) {
  const auto mesh = mesh_of_environment();
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

// What the rank holds of a parameter that begins at element `first` of a flat parameter with so
// many elements; the values count from `value` on.
tessera::Tensor shard_of(std::int64_t elements, std::int64_t first, std::int64_t all, float value,
                         tessera::Group& group) {
  tessera::Tensor tensor;
  tensor.dtype = tessera::DType::float32;
  tensor.shape = {elements};
  tensor.sharded = true;
  tensor.placement = tessera::Placement{group.size(), 1, 0, all / group.size(), first};
  for (const auto& box : tessera::boxes_of_part(*tensor.placement, tensor.shape, group.rank())) {
    const auto values = std::make_shared<std::vector<float>>();
    for (std::int64_t i = 0; i < box.sizes[0]; ++i)
      values->push_back(value + static_cast<float>(box.offsets[0] + i));
    const auto storage = std::make_shared<tessera::Storage>();
    storage->data = reinterpret_cast<std::byte*>(values->data());
    storage->owner = values;
    storage->size = values->size() * sizeof(float);
    tensor.pieces.push_back({box, storage, 0, {}, group.rank()});
  }
  return tensor;
}

// One flat parameter of 32 elements: `w` and, behind a gap, `b`.
tessera::Value model_of(float value, tessera::Group& group) {
  return tessera::Value::dict(
      {{"w", shard_of(21, 0, 32, value, group)}, {"b", shard_of(5, 24, 32, value + 100, group)}});
}

bool are_equal(const tessera::Value& left, const tessera::Value& right) {
  for (const char* name : {"w", "b"}) {
    const auto& a = left.at(name).as_tensor().pieces;
    const auto& b = right.at(name).as_tensor().pieces;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (std::memcmp(a[i].storage->data, b.at(i).storage->data, a[i].storage->size) != 0)
        return false;
    }
  }
  return true;
}

void save_as(const std::string& where, tessera::CheckpointKind kind, tessera::Group& group) {
  tessera::SaveOptions how;
  how.kind = kind;
  how.olmo.units = {{"", {"w", "b"}}};
  const auto model = model_of(1, group);
  const auto train = tessera::Value::dict({{"rank", group.rank()}});
  tessera::save(tessera::Value::dict({{"model", model}, {"train", train}}), where, how, group);
  std::printf(" saved");
  if (kind == tessera::CheckpointKind::olmo_full) return;
  auto tree = tessera::Value::dict({{"model", model_of(0, group)}});
  auto checkpoint = tessera::GroupCheckpoint::open(where, tree.at("model"), {}, group);
  checkpoint.load(tree);
  if (are_equal(tree.at("model"), model)) std::printf(" loaded");
}

void save_olmo_kinds(const std::string& directory) {
  using Kind = tessera::CheckpointKind;
  const auto mesh = mesh_of_environment();
  for (const auto kind :
       {Kind::olmo_full, Kind::olmo_torch_new, Kind::olmo_legacy, Kind::olmo_local}) {
    const std::string name(to_string(kind));
    std::printf("%s", name.c_str());
    try {
      save_as(directory + "/" + name, kind, mesh.checkpoint_group());
    } catch (const tessera::Error& error) {
      std::printf(" %s", error.what());
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: save_and_load DIR [olmo]\n");
    return 2;
  }
  try {
    torch::set_num_threads(1);
    if (argc > 2) {
      save_olmo_kinds(argv[1]);
    } else {
      save_and_load(argv[1]);
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
