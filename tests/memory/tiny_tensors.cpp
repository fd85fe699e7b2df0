// What a checkpoint of many tiny tensors takes of the heap, in bytes a tensor at its height,
// opening included. 100,000 tensors may take 300 MB above what the process has at rest. The bounds
// are what the work takes now and a little more: a copy of each name or chunk is seen.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/temporary_directory.h"
#include "heap.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"

namespace tessera {
namespace {

constexpr std::int64_t kTensors = 20'000;
constexpr std::int64_t kOlmoTensors = 5'000;  // of each kind

// Names as models have them, four floats each, which lie in one block: so they are not counted.
class Tiny {
 public:
  explicit Tiny(std::int64_t count = kTensors) : count_(count) {}

  Value tree() {
    Value tree = Value::dict();
    for (std::int64_t i = 0; i < count_; ++i) {
      auto storage = std::make_shared<Storage>();
      storage->data = reinterpret_cast<std::byte*>(elements_.data() + 4 * i);
      storage->size = 16;
      Tensor tensor;
      tensor.shape = {4};
      tensor.pieces.push_back({whole(tensor.shape), std::move(storage), 0, {}, -1});
      tree.set_item("layers." + std::to_string(i / 100) + ".part." + std::to_string(i % 100),
                    std::move(tensor));
    }
    return tree;
  }

 private:
  std::int64_t count_;
  std::vector<float> elements_ = std::vector<float>(4 * kTensors, 1.5F);
};

class TinyTensors : public testing::Test {
 protected:
  std::string path(const std::string& name) { return directory_.path() + "/" + name; }

  std::string saved() {
    Tiny tiny;
    save(tiny.tree(), path("saved"), {.threads = 1});
    return path("saved");
  }

  std::int64_t of_converting(int ranks) {
    const std::string source = saved();
    return heap_height_of([&] {
             ConvertOptions options;
             options.to = CheckpointKind::dcp;
             options.ranks = ranks;
             convert(source, path("converted"), options);
           }) /
           kTensors;
  }

 private:
  TemporaryDirectory directory_;
};

// Opening the checkpoint takes nearly all of these but for the save.
constexpr std::int64_t kMostOfSave = 2'100, kMost = 2'300;

TEST_F(TinyTensors, Save) {
  Tiny tiny;
  const Value tree = tiny.tree();
  EXPECT_LE(heap_height_of([&] { save(tree, path("c")); }) / kTensors, kMostOfSave);
}

TEST_F(TinyTensors, Load) {
  const std::string source = saved();
  Tiny tiny;
  Value tree = tiny.tree();
  EXPECT_LE(heap_height_of([&] { load(tree, source); }) / kTensors, kMost);
}

TEST_F(TinyTensors, ConvertToDcp) {
  EXPECT_LE(of_converting(1), kMost);
}

TEST_F(TinyTensors, ReshardToFive) {
  EXPECT_LE(of_converting(5), kMost);
}

// Live saves of the OLMo kinds by one rank, and loads of them.
struct OlmoMost {
  CheckpointKind kind;
  std::int64_t save, load;  // bytes a tensor
};
// In a legacy file each tensor is a ShardedTensor, which is a tree of forty values: one of these is
// in memory at a time, and 700 bytes of the pickle. Loads of DCP keep a block of digests, 1 MiB,
// for those that share it.
constexpr OlmoMost kOlmoMost[] = {{CheckpointKind::olmo_full, 1'900, 2'400},
                                  {CheckpointKind::olmo_torch_new, 3'100, 3'100},
                                  {CheckpointKind::olmo_legacy, 2'600, 5'200},
                                  {CheckpointKind::olmo_local, 2'800, 2'200}};

TEST_F(TinyTensors, OfTheOlmoKinds) {
  for (const OlmoMost& most : kOlmoMost) {
    SCOPED_TRACE(to_string(most.kind));
    Tiny tiny(kOlmoTensors);
    const Value model = tiny.tree();
    Value tree = Value::dict({{"model", model}});
    SaveOptions options;
    options.kind = most.kind;
    options.threads = 1;
    options.olmo.units = {{"", {}}};
    for (const auto& pair : model.pairs())
      options.olmo.units.back().names.push_back(pair.first.as_string());
    const std::string directory = path(std::string(to_string(most.kind)));
    const auto saved = heap_height_of([&] { (void)save(tree, directory, options); });
    const auto loaded = heap_height_of([&] { (void)load(tree, directory); });
    EXPECT_LE(saved / kOlmoTensors, most.save);
    EXPECT_LE(loaded / kOlmoTensors, most.load);
  }
}

}  // namespace
}  // namespace tessera
