// How long a mesh, a unit and its memory live: as long as somebody trains with them, and no longer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/ddp.h"
#include "tessera/optimizer_in_backward.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

using Store = c10::intrusive_ptr<c10d::Store>;
using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

// The same ranks once more, as a mesh of the test's own.
Mesh another_mesh(const Store& store, const Mesh& like) {
  MeshOptions options;
  options.device = torch::kCPU;
  return {store, like.rank(), like.size(), options};
}

// One step of SGD of one process with all ranks' batches.
std::map<std::string, torch::Tensor> stepped_alone(int world) {
  auto net = make_net({.blocks = 1});
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  loss_of(net, batch(0, 0, world)).backward();
  optimizer.step();
  std::map<std::string, torch::Tensor> values;
  for (const auto& entry : net->named_parameters()) values[entry.key()] = entry.value().detach();
  return values;
}

template <typename Model>
void expect_stepped_together(Model& model, ModuleRef module, const Mesh& ranks) {
  torch::optim::SGD optimizer(local_tensors(sharded_parameters(module)), 0.5);
  loss_of(model, batch_of(0, 0, ranks)).backward();
  optimizer.step();
  const auto found = full_state_dict(module);
  for (const auto& [name, expected] : stepped_alone(ranks.size())) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_TRUE(torch::allclose(found[name], expected, 1e-5, 1e-6)) << name;
  }
}

// Its handle goes at the end of this function.
WeakGroup wrap_over_a_mesh_that_goes(const Store& store, const Mesh& like,
                                     const std::function<void(const Mesh&)>& wrap) {
  const auto mesh = another_mesh(store, like);
  wrap(mesh);
  return WeakGroup(mesh.process_group());
}

using Wrap = std::function<void(Net&, const Mesh&)>;
class GoneMesh : public ::testing::TestWithParam<std::pair<const char*, Wrap>> {};

TEST_P(GoneMesh, IsKeptByWhatWasShardedOverIt) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_mesh(2, [&](Mesh& mesh) {
    WeakGroup group(mesh.process_group());
    {
      auto net = make_net({.blocks = 1});
      group = wrap_over_a_mesh_that_goes(store, mesh,
                                         [&](const Mesh& own) { GetParam().second(net, own); });
      expect_stepped_together(net, net, mesh);
      EXPECT_FALSE(group.expired());
    }
    EXPECT_TRUE(group.expired()) << "the connections are open, and nobody can use them";
  });
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, GoneMesh,
    ::testing::Values(
        std::pair("replicate", Wrap([](Net& net, const Mesh& mesh) { replicate(net, mesh); })),
        std::pair("fully_shard", Wrap([](Net& net, const Mesh& mesh) { shard(net, mesh); })),
        std::pair("hybrid", Wrap([](Net& net, const Mesh& mesh) {
                    fully_shard(net->blocks[0], mesh.split(1));
                    fully_shard(net, mesh.split(1));
                  })),
        std::pair("parked", Wrap([](Net& net, const Mesh& mesh) {
                    fully_shard(net->blocks[0], mesh, {.reshard_after_forward_ranks = 2});
                    fully_shard(net, mesh);
                  }))),
    [](const auto& kind) { return kind.param.first; });

template <typename Make>
void expect_wrapper_keeps_its_mesh(const Make& make) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_mesh(2, [&](Mesh& mesh) {
    WeakGroup group(mesh.process_group());
    {
      auto model = make(another_mesh(store, mesh), group);
      expect_stepped_together(model, model.module(), mesh);
    }
    EXPECT_TRUE(group.expired());
  });
}

TEST(GoneMesh, IsKeptByTheWrappersOfPyTorch) {
  for (const auto strategy : {ShardingStrategy::no_shard, ShardingStrategy::full_shard}) {
    expect_wrapper_keeps_its_mesh([&](const Mesh& mesh, WeakGroup& group) {
      group = WeakGroup(mesh.process_group());
      return FullyShardedDataParallel<Net>(make_net({.blocks = 1}), mesh,
                                           FullyShardedOptions{.sharding_strategy = strategy});
    });
  }
  expect_wrapper_keeps_its_mesh([](const Mesh& mesh, WeakGroup& group) {
    group = WeakGroup(mesh.process_group());
    return DistributedDataParallel<Net>(make_net({.blocks = 1}), mesh);
  });
}

// The mesh dies with the program that trains, whichever of the two it names first.
TEST(GoneMesh, IsOfNoUseToAModelThatDiedBefore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_mesh(2, [&](Mesh& mesh) {
    WeakGroup group(mesh.process_group());
    {
      const auto own = another_mesh(store, mesh);
      group = WeakGroup(own.process_group());
      const auto linear = std::make_shared<nn::LinearImpl>(4, 4);  // without a holder of Tessera's
      fully_shard(linear, own);
    }
    EXPECT_TRUE(group.expired());
  });
}

WeakStorage storage_of(const torch::Tensor& tensor) {
  return WeakStorage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

// As long as its mesh; the storage of its shard says whether it is gone.
WeakStorage shard_of_a_short_life() {
  const Mesh own;
  const auto linear = std::make_shared<nn::LinearImpl>(2, 2);
  fully_shard(linear, own);
  return storage_of(sharded_parameters(linear).front().local);
}

// Threads of one process are looked up in one table.
TEST(GoneMesh, IsNotKeptByAThreadThatWrapsAnotherModel) {
  std::atomic<bool> is_done = false;
  std::thread wrapping([&] {
    for (const Mesh mesh; !is_done;) fully_shard(std::make_shared<nn::LinearImpl>(2, 2), mesh);
  });
  for (int i = 0; i < 2000; ++i) {
    if (shard_of_a_short_life().expired()) continue;
    ADD_FAILURE() << "its shards outlive it, model " << i;
    break;
  }
  is_done = true;
  wrapping.join();
}

// What a dead model held
// ---------------------------------------------------------------------------

std::vector<WeakStorage> shards_of(ModuleRef module) {
  std::vector<WeakStorage> shards;
  for (const auto& parameter : sharded_parameters(module))
    shards.push_back(storage_of(parameter.local));
  return shards;
}

void expect_gone(const std::vector<WeakStorage>& shards, const char* what) {
  for (const auto& shard : shards) EXPECT_TRUE(shard.expired()) << what;
}

TEST(DeadModel, LeavesNoShardsBehind) {
  run_mesh(2, [](Mesh& mesh) {
    std::vector<WeakStorage> shards;
    {
      auto net = make_net({.blocks = 2});
      shard(net, mesh);
      loss_of(net, batch_of(0, 0, mesh)).backward();
      shards = shards_of(net);
    }
    expect_gone(shards, "fully_shard");
    {
      const FullyShardedDataParallel<nn::Linear> model(nn::Linear(5, 4), mesh);
      shards = shards_of(model.module());
    }
    expect_gone(shards, "FullyShardedDataParallel of a module of torch's");
  });
}

// Assigning goes as destroying does.
TEST(DeadModel, BehindAWrapperLeavesNothingWhenAnotherTakesItsPlace) {
  run_mesh(2, [](Mesh& mesh) {
    std::vector<WeakStorage> shards;
    std::vector<WeakTensor> tensors;
    FullyShardedDataParallel<nn::Linear> sharded(nn::Linear(5, 4), mesh);
    DistributedDataParallel<nn::Linear> whole(nn::Linear(5, 4), mesh);
    shards = shards_of(sharded.module());
    for (const auto& parameter : whole->parameters())
      tensors.emplace_back(parameter.getIntrusivePtr());
    const auto x = torch::ones({2, 5});
    (sharded(x).sum() + whole(x).sum()).backward();
    sharded = FullyShardedDataParallel<nn::Linear>(nn::Linear(5, 4), mesh);
    whole = DistributedDataParallel<nn::Linear>(nn::Linear(5, 4), mesh);
    expect_gone(shards, "FullyShardedDataParallel");
    for (const auto& tensor : tensors) EXPECT_TRUE(tensor.expired());
    (sharded(x).sum() + whole(x).sum()).backward();
    EXPECT_TRUE(whole->weight.grad().defined());
    const auto copy = sharded;
    shards = shards_of(sharded.module());
    sharded = FullyShardedDataParallel<nn::Linear>(nn::Linear(5, 4), mesh);
    for (const auto& shard : shards) EXPECT_FALSE(shard.expired()) << "another one has it";
  });
}

TEST(DeadModel, WithoutAHolderLeavesThemToTheNextPassOverItsMesh) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({.blocks = 1});
    shard(net, mesh);
    auto linear = std::make_shared<nn::LinearImpl>(4, 4);
    fully_shard(linear, mesh);
    const auto shards = shards_of(linear);
    linear.reset();
    loss_of(net, batch_of(0, 0, mesh)).backward();
    expect_gone(shards, "a shared_ptr");
  });
}

TEST(DeadModel, APartThatIsKeptGoesOn) {
  run_mesh(2, [](Mesh& mesh) {
    testing::Block block{nullptr};
    {
      auto net = make_net({.blocks = 1});
      shard(net, mesh);
      block = net->blocks[0];
    }
    const auto loss = block(torch::ones({2, testing::kWidth})).sum();
    loss.backward();
    for (const auto& parameter : sharded_parameters(block))
      EXPECT_TRUE(parameter.local.grad().defined()) << parameter.name();
  });
}

// All ranks drop it at the same place of their programs; whoever comes next finds the mesh usable.
void expect_next_model_trains(const Mesh& mesh, bool gathers) {
  for (const bool sharded : {true, false}) {
    auto net = make_net({.blocks = 2});
    if (sharded) shard(net, mesh);
    if (!sharded) replicate(net, mesh);
    set_is_last_backward(net, false);
    loss_of(net, batch_of(0, 0, mesh)).backward();
    if (gathers && sharded) static_cast<void>(start_unshard(net));
    net = make_net({.blocks = 1});
    shard(net, mesh);
    expect_stepped_together(net, net, mesh);
  }
}

TEST(DeadModel, LeavesAMeshThatIsUsedOn) {
  for (const bool same_host : {true, false}) {
    for (const bool gathers : {true, false}) {
      run_mesh(
          2, [&](Mesh& mesh) { expect_next_model_trains(mesh, gathers); }, std::chrono::seconds(10),
          same_host);
    }
  }
}

std::unique_ptr<torch::optim::Optimizer> make_adam(std::vector<torch::Tensor> parameters) {
  return std::make_unique<torch::optim::Adam>(std::move(parameters), 0.1);
}

// Parameter, hook and optimizer know each other.
TEST(DeadModel, TakesItsOptimizersInBackwardAlong) {
  run_mesh(2, [](Mesh& mesh) {
    std::vector<WeakTensor> tensors;
    std::vector<WeakStorage> shards;
    for (const bool sharded : {true, false}) {
      auto net = make_net({.blocks = 1});
      if (sharded) shard(net, mesh);
      apply_optimizer_in_backward(sharded_parameters(net), make_adam);
      loss_of(net, batch_of(0, 0, mesh)).backward();
      for (const auto& parameter : sharded_parameters(net)) {
        tensors.emplace_back(parameter.local.getIntrusivePtr());
        shards.push_back(storage_of(parameter.local));
      }
    }
    for (const auto& tensor : tensors) EXPECT_TRUE(tensor.expired());
    expect_gone(shards, "optimizers in backward");
  });
}

}  // namespace
}  // namespace tessera
