// What converting many tiny tensors to a torch.save file takes above what opening the source takes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/temporary_directory.h"
#include "heap.h"
#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/convert.h"

namespace tessera {
namespace {

constexpr std::int64_t kTensors = 10'000;

// Names as models have them, four floats each.
Value many_tensors() {
  Value tree = Value::dict();
  for (std::int64_t i = 0; i < kTensors; ++i) {
    auto data = std::make_shared<std::vector<float>>(4, static_cast<float>(i));
    auto storage = std::make_shared<Storage>();
    storage->data = reinterpret_cast<std::byte*>(data->data());
    storage->size = 16;
    storage->owner = data;
    Tensor tensor;
    tensor.shape = {4};
    tensor.pieces.push_back({whole(tensor.shape), storage, 0, {}, -1});
    tree.set_item("layers." + std::to_string(i / 100) + ".part." + std::to_string(i % 100),
                  std::move(tensor));
  }
  return tree;
}

class ManyTensors : public testing::Test {
 protected:
  // Bytes a tensor that the conversion of `source` takes at its height above the height of opening
  // it, which is what the process has at rest when the conversion begins.
  std::int64_t above_rest(const std::string& source) {
    const std::int64_t opening = heap_height_of([&] { (void)Checkpoint::open(source); });
    const std::int64_t converting = heap_height_of([&] {
      ConvertOptions options;
      options.to = CheckpointKind::torch_file;
      convert(source, path("out.pt"), options);
    });
    return (converting - opening) / kTensors;
  }

  std::string path(const std::string& name) { return directory_.path() + "/" + name; }

  // `name` with the tensors in it.
  std::string made(const std::string& name, CheckpointKind kind) {
    const std::unique_ptr<Group> alone = solo_group();
    save(many_tensors(), path("dcp"), *alone);
    if (kind == CheckpointKind::dcp) return path("dcp");
    ConvertOptions options;
    options.to = kind;
    convert(path("dcp"), path(name), options);
    return path(name);
  }

 private:
  TemporaryDirectory directory_;
};

// 300 MB for 400,000 tensors.
constexpr std::int64_t kMost = 750;

TEST_F(ManyTensors, FromTorchSave) {
  EXPECT_LE(above_rest(made("a.pt", CheckpointKind::torch_file)), kMost);
}

TEST_F(ManyTensors, FromSafetensors) {
  EXPECT_LE(above_rest(made("a.safetensors", CheckpointKind::safetensors)), kMost);
}

TEST_F(ManyTensors, FromDcp) {
  EXPECT_LE(above_rest(made("", CheckpointKind::dcp)), kMost);
}

}  // namespace
}  // namespace tessera
