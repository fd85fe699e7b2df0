// The victim of tests/crash/kill_test.py: one of N ranks that save without end.
//   save_loop DIRECTORY          saves DIRECTORY/step1, step2, ... and, in turns, over
//   DIRECTORY/same
// Every element of save k is k, so that a checkpoint mixed from two saves is seen at once.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/mesh.h"

namespace {

using tessera::Box;
using tessera::Shape;
using tessera::Value;

Value rows(const Shape& shape, const tessera::Mesh& mesh, float fill) {
  tessera::Tensor tensor;
  tensor.shape = shape;
  tensor.sharded = true;
  Box box = tessera::whole(shape);
  const std::int64_t chunk = (shape[0] + mesh.size() - 1) / mesh.size();
  box.offsets[0] = std::min(chunk * mesh.rank(), shape[0]);
  box.sizes[0] = std::min(chunk, shape[0] - box.offsets[0]);
  auto numbers = std::make_shared<std::vector<float>>(
      static_cast<std::size_t>(tessera::numel(box.sizes)) + 1, fill);
  auto storage = std::make_shared<tessera::Storage>();
  storage->data = reinterpret_cast<std::byte*>(numbers->data());
  storage->size = (numbers->size() - 1) * sizeof(float);
  storage->owner = numbers;
  tensor.pieces.push_back({box, std::move(storage), 0, {}, -1});
  return Value(std::move(tensor));
}

Value tree_of(const tessera::Mesh& mesh, int step) {
  const auto fill = static_cast<float>(step);
  Value model = Value::dict();
  for (int i = 0; i < 8; ++i)
    model.set_item("w" + std::to_string(i), rows({513, 1024}, mesh, fill));
  return Value::dict({{"model", model}, {"step", Value(step)}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string directory = argv[1];
  const tessera::Mesh mesh = tessera::Mesh::from_environment();
  tessera::SaveOptions options;
  options.overwrite = true;
  for (int step = 1;; ++step) {
    tessera::save(tree_of(mesh, step), directory + "/same", options, mesh.checkpoint_group());
    tessera::save(tree_of(mesh, step), directory + "/step" + std::to_string(step), options,
                  mesh.checkpoint_group());
    if (mesh.rank() != 0) continue;
    if (step > 2) std::filesystem::remove_all(directory + "/step" + std::to_string(step - 2));
    std::printf("%d\n", step);
    std::fflush(stdout);
  }
}
