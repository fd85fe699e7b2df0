// Saves in the background of what is on a device (torch/test_device): copied into locked pages
// beside the next step, without races, and what they hold of the device they give back.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/temporary_directory.h"
#include "fsdp/state/model_state.h"
#include "fsdp/testing/test_training.h"
#include "tessera/checkpoint.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/optim.h"
#include "torch/device.h"
#include "torch/tensor.h"
#include "torch/test_device/device_mesh.h"
#include "torch/test_device/test_device.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;
using testing::loss_of;
using testing::make_net;

SteadyMemory all_steady() {
  return {.has = [](const Storage& /*storage*/) { return true; }};
}

// A training that saves behind each step, and what the parameters were then.
class SavedTraining {
 public:
  SavedTraining(Mesh& mesh, Overlap how)
      : mesh_(mesh), writer_({.idle = false, .overlap = how}), net_(make_net({})) {
    testing::shard(net_, mesh);
    optimizer_.emplace(sharded_parameters(net_), AdamWOptions{.lr = 0.01});
  }

  void train(int steps) {
    for (int step = 0; step < steps; ++step) {
      loss_of(net_, testing::batch_of(step, 0, mesh_).to(mesh_.device())).backward();
      optimizer_->step();
      optimizer_->zero_grad();
      auto& was = was_.emplace_back();
      for (const auto& parameter : sharded_parameters(net_))
        was[parameter.name()] = parameter.local.detach().clone();
      const Value tree = model_state_to_save(net_);
      for (const auto& [name, leaf] : tree.pairs()) {
        for (const auto& piece : leaf.as_tensor().pieces) held_.emplace_back(piece.storage->device);
      }
      saves_.push_back(writer_.save(tree, place(step), {}, {}, all_steady()));
    }
    writer_.wait();
  }
  void expect_saved_as_was() const {
    for (std::size_t step = 0; step < was_.size(); ++step) {
      const Value tree = Checkpoint::open(place(static_cast<int>(step))).load();
      for (const auto& [name, tensor] : was_[step])
        EXPECT_TRUE(torch::equal(tensor_of(tree.at(name).as_tensor()), tensor.cpu())) << name;
    }
  }
  // Memory of the device that something still has.
  [[nodiscard]] std::size_t held() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(held_, [](const auto& memory) { return !memory.expired(); }));
  }

 private:
  [[nodiscard]] std::string place(int step) const {
    return run_.path() + "/" + std::to_string(step);
  }

  Mesh& mesh_;
  const TemporaryDirectory run_;
  CheckpointWriter writer_;
  testing::Net net_;
  std::optional<AdamW> optimizer_;
  std::vector<std::map<std::string, torch::Tensor>> was_;
  std::vector<PendingSave> saves_;
  std::vector<std::weak_ptr<DeviceMemory>> held_;
};

class DeviceWriters : public ::testing::TestWithParam<Overlap> {};

TEST_P(DeviceWriters, CopyIntoLockedPagesWithoutRaces_P33) {
  const int made_before = testing::PageLocks::made();
  {
    const testing::PageLocks locks;
    testing::run_device_mesh(1, [&](Mesh& mesh) {
      SavedTraining training(mesh, GetParam());
      static_cast<void>(testing::take_counts(mesh.device().index()));
      training.train(5);
      EXPECT_THAT(testing::take_counts(mesh.device().index()).pageable, IsEmpty());
      EXPECT_EQ(training.held(), 0U);
      training.expect_saved_as_was();
      EXPECT_EQ(testing::PageLocks::held(), 1);
    });
  }
  EXPECT_EQ(testing::PageLocks::made() - made_before, 1);  // once for all saves
  EXPECT_EQ(testing::PageLocks::held(), 0);
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

// Where pages cannot be locked, copies go through windows.
TEST_P(DeviceWriters, CopyThroughWindowsWithoutRaces) {
  testing::run_device_mesh(1, [&](Mesh& mesh) {
    SavedTraining training(mesh, GetParam());
    training.train(3);
    training.expect_saved_as_was();
    EXPECT_EQ(training.held(), 0U);
  });
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(BothWays, DeviceWriters,
                         ::testing::Values(Overlap::never, Overlap::always), [](const auto& given) {
                           return given.param == Overlap::always ? "always" : "never";
                         });

// The test finds what it looks for: without a wait the next step would change what is copied.
TEST(DeviceWriter, AStepThatDoesNotWaitIsARace) {
  testing::run_device_mesh(1, [&](Mesh& mesh) {
    const torch::NoGradGuard no_grad;
    auto tensor = torch::ones({1000}, torch::TensorOptions(mesh.device()));
    std::vector<std::byte> bytes(4000);
    const auto memory = leaf_of(tensor).pieces.at(0).storage->device->beside();
    const auto window = memory->window(bytes.size());
    const ReadRange range{0, window.bytes};
    const auto copy = memory->copy_out({&range, 1});
    tensor.fill_(2);
    copy->wait();
  });
  EXPECT_THAT(testing::take_races(), ::testing::SizeIs(1));
}

}  // namespace
}  // namespace tessera
