// A save takes rank 0's values of a buffer if each rank has its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "base/testing.h"
#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "fsdp/state/model_state.h"
#include "tessera/ddp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/sync_batchnorm.h"
#include "tessera/training_state.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::run_mesh;

constexpr int kRanks = 4;
const std::vector<std::string> kBuffers{"running_mean", "running_var", "num_batches_tracked"};

enum class Held : std::uint8_t { rows, flat, whole };

// Sharded or replicated, and once called with a batch of its rank's own.
class Normed {
 public:
  Normed(Held held, const Mesh& mesh) {
    if (held == Held::rows) {
      fully_shard(norm, mesh);
    } else if (held == Held::flat) {
      fsdp_.emplace(norm, mesh, FullyShardedOptions{.use_orig_params = true});
    } else {
      ddp_.emplace(norm, mesh, DistributedDataParallelOptions{{}, false});
    }
    const torch::NoGradGuard no_grad;
    norm->num_batches_tracked.fill_(mesh.rank());
    call_module(norm, torch::arange(12, at::kFloat).view({4, 3}) * (mesh.rank() + 1));
  }

  nn::BatchNorm1d norm{3};

 private:
  std::optional<FullyShardedDataParallel<nn::BatchNorm1d>> fsdp_;
  std::optional<DistributedDataParallel<nn::BatchNorm1d>> ddp_;
};

torch::Tensor in_checkpoint(const std::string& path, const std::string& name) {
  const auto tree = Checkpoint::open(path).load();
  return tensor_of(tree.at("model").at(name).as_tensor());
}
torch::Tensor of_rank0(const torch::Tensor& buffer, const Mesh& mesh) {
  auto copy = buffer.clone().to(at::kDouble);
  if (mesh.rank() > 0) copy.zero_();
  mesh.all_reduce_sum(copy);
  return copy.to(buffer.scalar_type());
}

TEST(SavedBuffers, AreRankZerosAndOneWarningSaysSo) {
  for (const auto held : {Held::rows, Held::flat, Held::whole}) {
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/c";
    const testing_support::Warnings warnings;
    run_mesh(kRanks, [&](Mesh& mesh) {
      Normed model(held, mesh);
      const auto before = full_state_dict(model.norm);
      save(TrainingState(model.norm), path, mesh.checkpoint_group());
      for (const auto& name : kBuffers) {
        const auto own = model.norm->named_buffers()[name];
        const auto first = of_rank0(own, mesh);
        EXPECT_TRUE(torch::equal(in_checkpoint(path, name), first)) << name;
        // What a rank has is its own, in the model and in what is no save.
        EXPECT_EQ(torch::equal(own, first), mesh.rank() == 0) << name;
        EXPECT_TRUE(torch::equal(before[name], own)) << name;
        EXPECT_TRUE(torch::equal(full_state_dict(model.norm)[name], own)) << name;
        EXPECT_TRUE(torch::equal(tensor_of(model_state(model.norm).at(name).as_tensor()), own));
      }
      mesh.group().barrier();
      TrainingState state(model.norm);
      load(state, path, mesh.checkpoint_group());
      EXPECT_EQ(model.norm->num_batches_tracked.item<int>(), 1);
    });
    EXPECT_THAT(warnings.texts(), ElementsAre(::testing::AllOf(
                                      HasSubstr("'num_batches_tracked' and 2 more"),
                                      HasSubstr("sync_buffers()"), HasSubstr("SyncBatchNorm"))));
  }
}

TEST(SavedBuffers, WithOtherDtypesInTrainingAreRankZeros) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/c";
  const testing_support::Warnings warnings;
  run_mesh(2, [&](Mesh& mesh) {
    nn::BatchNorm1d norm(3);
    const MixedPrecision precision{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16};
    fully_shard(norm, mesh, {.mixed_precision = precision});
    const torch::NoGradGuard no_grad;
    call_module(norm, torch::arange(12, at::kFloat).view({4, 3}) * (mesh.rank() + 1));
    save(TrainingState(norm), path, mesh.checkpoint_group());
    EXPECT_TRUE(torch::equal(in_checkpoint(path, "running_mean"),
                             of_rank0(norm->running_mean, mesh).to(at::kFloat)));
  });
  EXPECT_EQ(warnings.texts().size(), 1u);
}

TEST(SavedBuffers, ThatDifferAreRefusedOrKeptWhereTheSaveSaysSo) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/c";
  const testing_support::Warnings warnings;
  run_mesh(2, [&](Mesh& mesh) {
    const Normed model(Held::rows, mesh);
    auto& group = mesh.checkpoint_group();
    const TrainingState state(model.norm);
    EXPECT_EQ(code_of([&] { save(state, path, {.copies = IfDiffers::refuse}, group); }),
              ErrorCode::mismatch);
    save(state, path, {.copies = IfDiffers::keep}, group);
    EXPECT_TRUE(torch::equal(in_checkpoint(path, "running_mean"),
                             of_rank0(model.norm->running_mean, mesh)));
    if (mesh.rank() == 1) {
      EXPECT_TRUE(
          torch::equal(in_checkpoint(path, "running_mean.rank1"), model.norm->running_mean));
    }
    mesh.group().barrier();
  });
  EXPECT_THAT(warnings.texts(), IsEmpty());
}

TEST(SavedBuffers, ThatAreAlikeAreNotTalkedOf) {
  const TemporaryDirectory directory;
  const testing_support::Warnings warnings;
  run_mesh(2, [&](Mesh& mesh) {
    SyncBatchNorm norm(3, mesh);
    fully_shard(norm, mesh);
    const torch::NoGradGuard no_grad;
    norm(torch::arange(12, at::kFloat).view({4, 3}) * (mesh.rank() + 1));
    save(TrainingState(norm), directory.path() + "/sync", mesh.checkpoint_group());
    const Normed model(Held::rows, mesh);
    sync_buffers(model.norm, mesh);
    save(TrainingState(model.norm), directory.path() + "/synced", mesh.checkpoint_group());
  });
  EXPECT_THAT(warnings.texts(), IsEmpty());
}

// Stages of a pipeline have other names, and save what rank 0 has not from where it is.
TEST(SavedBuffers, ThatRankZeroLacksAreTheOthers) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/c";
  run_mesh(2, [&](Mesh& mesh) {
    nn::Module stage;
    stage.register_buffer(mesh.rank() == 0 ? "first" : "second",
                          torch::full({2}, mesh.rank() + 1.0F));
    save(TrainingState(stage), path, mesh.checkpoint_group());
    EXPECT_EQ(in_checkpoint(path, "first")[0].item<float>(), 1);
    EXPECT_EQ(in_checkpoint(path, "second")[0].item<float>(), 2);
    mesh.group().barrier();
  });
}

}  // namespace
}  // namespace tessera
