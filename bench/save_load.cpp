// How long do save and load of a GPT's model and AdamW state take? Started by torchrun --no-python,
// beside bench/peers/dcp_save_load.py, which holds the same tensors: rank 0 prints one line a
// round. BENCH_SHAPE=layers,width,vocabulary; on a GPU where the mesh is on one.
//   bench_save_load DIRECTORY ROUNDS
#include <torch/torch.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "measure.h"
#include "tessera/checkpoint.h"
#include "tessera/mesh.h"
#include "tessera/tensor_value.h"

namespace {

using tessera::Box;
using tessera::Shape;
using tessera::Value;
using tessera::bench::now;
using tessera::bench::peak_memory;

// Layers, width and vocabulary.
std::array<long, 3> model_shape() {
  std::array<long, 3> shape{12, 1024, 32000};
  if (const char* text = std::getenv("BENCH_SHAPE"))
    std::sscanf(text, "%ld,%ld,%ld", &shape[0], &shape[1], &shape[2]);
  return shape;
}

// This rank's rows of a float tensor, filled with numbers that differ from row to row.
Value rows(const Shape& shape, const tessera::Mesh& mesh) {
  tessera::Tensor tensor;
  tensor.shape = shape;
  tensor.sharded = !shape.empty();
  Box box = tessera::whole(shape);
  if (!shape.empty()) {
    const std::int64_t chunk = (shape[0] + mesh.size() - 1) / mesh.size();
    box.offsets[0] = std::min(chunk * mesh.rank(), shape[0]);
    box.sizes[0] = std::min(chunk, shape[0] - box.offsets[0]);
  }
  auto numbers = torch::empty(box.sizes);
  auto* first = numbers.data_ptr<float>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i)
    first[i] = static_cast<float>((i * 2654435761) % 1000003) * 1e-6F;
  if (!shape.empty()) numbers = numbers.to(mesh.device());
  tensor.pieces.push_back(
      {box, tessera::to_value(numbers).as_tensor().pieces[0].storage, 0, {}, -1});
  return Value(std::move(tensor));
}

Value state_tree(const tessera::Mesh& mesh) {
  const auto [layers, dim, vocabulary] = model_shape();
  std::vector<std::pair<std::string, Shape>> shapes = {{"wte.weight", {vocabulary, dim}}};
  for (int i = 0; i < layers; ++i) {
    const std::string block = "h." + std::to_string(i) + ".";
    shapes.push_back({block + "attn.qkv.weight", {3 * dim, dim}});
    shapes.push_back({block + "attn.out.weight", {dim, dim}});
    shapes.push_back({block + "mlp.up.weight", {4 * dim, dim}});
    shapes.push_back({block + "mlp.down.weight", {dim, 4 * dim}});
    shapes.push_back({block + "ln1.weight", {dim}});
    shapes.push_back({block + "ln2.weight", {dim}});
  }
  Value model = Value::dict();
  Value state = Value::dict();
  for (const auto& [name, shape] : shapes) {
    model.set_item(name, rows(shape, mesh));
    state.set_item(name, Value::dict({{"exp_avg", rows(shape, mesh)},
                                      {"exp_avg_sq", rows(shape, mesh)},
                                      {"step", rows({}, mesh)}}));
  }
  Value group = Value::dict({{"lr", Value(1e-3)}});
  return Value::dict(
      {{"model", model},
       {"optim", Value::dict({{"state", state}, {"param_groups", Value::list({group})}})}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string directory = argv[1];
  const tessera::Mesh mesh = tessera::Mesh::from_environment();
  Value tree = state_tree(mesh);
  for (int round = 0; round < std::atoi(argv[2]); ++round) {
    tessera::SaveOptions options;
    options.overwrite = true;
    options.threads = 1;
    mesh.checkpoint_group().barrier();
    const double begin = now();
    tessera::save(tree, directory, options, mesh.checkpoint_group());
    mesh.checkpoint_group().barrier();
    const double saved = now();
    tessera::LoadOptions how;
    how.threads = 1;
    tessera::load(tree, directory, how, mesh.checkpoint_group());
    mesh.checkpoint_group().barrier();
    const double loaded = now();
    if (mesh.rank() == 0) {
      std::printf("save %.3f load %.3f peak_mb %ld\n", saved - begin, loaded - saved,
                  peak_memory());
      std::fflush(stdout);
    }
  }
  return 0;
}
