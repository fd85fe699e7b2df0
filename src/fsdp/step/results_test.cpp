// Units whose results are parameters: a positional embedding, a weight that is handed out to be
// used once more outside.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::with_values;

struct PositionsImpl : nn::Module {
  torch::Tensor table;
  PositionsImpl() { table = register_parameter("table", torch::zeros({5, 4})); }
  torch::Tensor forward() { return table; }
};
TESSERA_MODULE(Positions);

struct WithPositionsImpl : nn::Module {
  Positions positions{nullptr};
  nn::Linear out{nullptr};
  WithPositionsImpl() {
    positions = register_module("positions", Positions());
    out = register_module("out", nn::Linear(4, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(x + positions()).square().sum(); }
};
TESSERA_MODULE(WithPositions);

// A tied weight, for whoever computes the logits.
struct HandedOutImpl : nn::Module {
  nn::Embedding embedding{nullptr};
  HandedOutImpl() { embedding = register_module("embedding", nn::Embedding(6, 4)); }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& ids) {
    return {embedding(ids), embedding->weight};
  }
};
TESSERA_MODULE(HandedOut);

torch::Tensor loss_of(WithPositions& net, int place) {
  return net(torch::full({2, 5, 4}, 0.1 * (place + 1)));
}
torch::Tensor loss_of(HandedOut& net, int place) {
  const auto [hidden, weight] = net(torch::tensor({1 + place, 2, 3}));
  return torch::matmul(hidden, weight.t()).square().sum();
}

constexpr int kPasses = 4;

// Losses of the mean over `ranks` batches, by steps of SGD in one process.
template <typename Model>
std::vector<double> losses_alone(Model net, int ranks, bool shows_rank_0) {
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  std::vector<double> losses;
  for (int step = 0; step < kPasses; ++step) {
    for (int rank = 0; rank < ranks; ++rank) {
      const auto loss = loss_of(net, rank);
      if (rank == (shows_rank_0 ? 0 : ranks - 1)) losses.push_back(loss.template item<double>());
      (loss / ranks).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

std::size_t hooks_of(const torch::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && meta->cpp_hooks_list_ ? meta->cpp_hooks_list_->size() : 0;
}

std::size_t hooks_of(const nn::Module& module) {
  std::size_t count = 0;
  for (const auto& parameter : module.parameters()) count += hooks_of(parameter);
  return count;
}

template <typename Model, typename Wrap>
void expect_as_alone(const Model& make, const Wrap& wrap) {
  run_mesh(2, [&](Mesh& mesh) {
    auto net = make();
    wrap(net, mesh);
    torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), 0.05);
    const auto expected = losses_alone(make(), 2, mesh.rank() == 0);
    std::size_t hooks = 0;
    for (int step = 0; step < kPasses; ++step) {
      const auto loss = loss_of(net, mesh.rank());
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      EXPECT_NEAR(loss.template item<double>(), expected[step], 1e-4) << "step " << step;
      if (step == 0) hooks = hooks_of(*net);
      EXPECT_EQ(hooks_of(*net), hooks) << "after step " << step;
    }
  });
}

WithPositions with_positions() {
  return with_values(WithPositions(), 3);
}
HandedOut handed_out() {
  return with_values(HandedOut(), 3);
}

// FSDP2 trains both.
TEST(ResultThatIsAParameter, TrainsWhereItIsSharded) {
  const ShardOptions stays{.reshard_after_forward = false};
  expect_as_alone(with_positions, [&](WithPositions& net, const Mesh& mesh) {
    fully_shard(net->positions, mesh, stays);
    fully_shard(net, mesh);
  });
  expect_as_alone(handed_out, [](HandedOut& net, const Mesh& mesh) { fully_shard(net, mesh); });
}

TEST(ResultThatIsAParameter, TrainsWhereItIsWhole) {
  expect_as_alone(with_positions, [](WithPositions& net, const Mesh& mesh) {
    replicate(net->positions, mesh);
    replicate(net, mesh);
  });
  expect_as_alone(with_positions,
                  [](WithPositions& net, const Mesh& mesh) { replicate(net, mesh); });
  expect_as_alone(handed_out, [](HandedOut& net, const Mesh& mesh) { replicate(net, mesh); });
}

TEST(ResultThatIsAParameter, TrainsUnderFsdp1) {
  for (const bool orig : {false, true}) {
    for (const auto strategy : {ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard}) {
      expect_as_alone(handed_out, [&](HandedOut& net, const Mesh& mesh) {
        const FullyShardedDataParallel<HandedOut> wrapped(
            net, mesh, {.sharding_strategy = strategy, .use_orig_params = orig});
      });
    }
  }
}

// A tensor that trains and that no module knows.
struct UnknownLeafImpl : nn::Module {
  nn::Linear out{nullptr};
  torch::Tensor leaf = torch::ones({4}).set_requires_grad(true);
  UnknownLeafImpl() { out = register_module("out", nn::Linear(4, 4)); }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    return {out(x), leaf};
  }
};
TESSERA_MODULE(UnknownLeaf);

// In both ways, one after the other.
template <typename Model, typename Body>
void run_sharded_and_whole(const Body& body) {
  run_mesh(2, [&](Mesh& mesh) {
    for (const bool sharded : {true, false}) {
      auto net = with_values(Model(), 3);
      if (sharded) fully_shard(net, mesh);
      if (!sharded) replicate(net, mesh);
      body(net);
    }
  });
}

TEST(ResultThatIsALeaf, GetsNoHookOfAPass) {
  run_sharded_and_whole<UnknownLeaf>([](UnknownLeaf& net) {
    for (int step = 0; step < kPasses; ++step) {
      const auto [out, leaf] = net(torch::ones({2, 4}));
      (out.square().sum() + leaf.sum()).backward();
      EXPECT_EQ(hooks_of(net->leaf), 0U) << step;
      EXPECT_EQ(net->leaf.grad().sum().item<float>(), 4.F * (step + 1)) << step;
    }
  });
}

// The backward of a model's next stage begins at such a leaf.
struct StageImpl : nn::Module {
  nn::Linear out{nullptr};
  StageImpl() { out = register_module("out", nn::Linear(4, 4)); }
  torch::Tensor forward(const torch::Tensor& x) { return out(x).detach().requires_grad_(); }
};
TESSERA_MODULE(Stage);

TEST(ResultThatIsALeaf, OfTheCallersOwnHasItsGradient) {
  run_sharded_and_whole<Stage>([](Stage& net) {
    for (int step = 0; step < kPasses; ++step) {
      const auto out = net(torch::ones({2, 4}));
      (out * 2).sum().backward();
      ASSERT_TRUE(out.grad().defined()) << step;
      EXPECT_EQ(out.grad().sum().item<float>(), 16.F);
    }
  });
}

// It does not matter whose parameter it is: what lasts longer than the pass gets no hook of a pass.
TEST(ResultThatIsAParameter, MayBeIgnored) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = handed_out();
    testing::move_to(mesh.device(), {net->embedding->weight});
    fully_shard(net, mesh, {.ignored_parameters = {net->embedding->weight}});
    for (int step = 0; step < kPasses; ++step) {
      loss_of(net, 0).backward();
      EXPECT_EQ(hooks_of(net->embedding->weight), 0U) << step;
    }
  });
}

}  // namespace
}  // namespace tessera
