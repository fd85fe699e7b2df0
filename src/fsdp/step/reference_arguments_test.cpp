// Forwards that return nothing or change what they take by reference: a cache of keys, an output
// of the caller's. Numbers are those of one process, for every kind of unit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp/testing/shardings.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::Sharding;
using testing::with_values;
using Tensors = std::vector<torch::Tensor>;

// Its results are in `cache` alone: the first tensor is replaced, one is added.
struct WriterImpl : nn::Module {
  nn::Linear linear{nullptr};
  WriterImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
  void forward(const torch::Tensor& x, Tensors& cache) {
    cache.push_back(linear(x + cache.at(1)));
    cache.at(0) = cache.at(0) * linear->bias;
  }
};
TESSERA_MODULE(Writer);

struct AssignerImpl : nn::Module {
  nn::Linear linear{nullptr};
  AssignerImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
  torch::Tensor forward(torch::Tensor& x, const Tensors& cache) {
    x = linear(x);
    return x + cache.back();
  }
};
TESSERA_MODULE(Assigner);

struct CachingNetImpl : nn::Module {
  Writer writer;
  Assigner assigner;
  nn::Linear in{nullptr};
  CachingNetImpl() {
    in = register_module("in", nn::Linear(4, 4));
    register_module("writer", writer.ptr());
    register_module("assigner", assigner.ptr());
  }
  torch::Tensor forward(const torch::Tensor& input, Tensors& cache) {
    auto x = in(input);
    cache = {x.sin(), x.cos()};
    const auto untouched = cache.at(1);
    writer(x, cache);
    EXPECT_EQ(cache.size(), 3U);
    EXPECT_TRUE(cache.at(1).is_same(untouched));
    const auto before = x;
    const auto y = assigner(x, cache);
    EXPECT_FALSE(x.is_same(before));
    return (y + x + cache.at(0)).square().mean();
  }
};
TESSERA_MODULE(CachingNet);

std::vector<double> train_caching(CachingNet& net, int first_rank, int ranks) {
  torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), 0.05);
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(70 + rank);
      Tensors cache;
      const auto loss = net(torch::randn({3, 4}, generator), cache);
      const auto all = loss + cache.at(2).cos().mean();  // a result of the root's, too
      (all / ranks).backward();
      losses.push_back(all.item<double>());
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

class ReferenceArguments : public ::testing::TestWithParam<Sharding> {};

TEST_P(ReferenceArguments, AreChangedAndTrainAsInOneProcess) {
  run_mesh(2, [&](Mesh& mesh) {
    auto alone = with_values(CachingNet(), 5), net = with_values(CachingNet(), 5);
    testing::shard_as(GetParam(), {}, mesh, net, net->writer, net->assigner);
    const auto all = train_caching(alone, 0, 2);
    const auto mine = train_caching(net, mesh.rank(), 1);
    for (int step = 0; step < 3; ++step)
      EXPECT_NEAR(mine[step], all[2 * step + mesh.rank()], 1e-5) << step;
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, ReferenceArguments,
                         ::testing::Values(Sharding::rows, Sharding::flat, Sharding::original,
                                           Sharding::replicate),
                         testing::sharding_name);

// What forward takes as a copy is its own.
struct CopierImpl : nn::Module {
  nn::Linear linear{nullptr};
  CopierImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
  torch::Tensor forward(torch::Tensor x, Tensors cache) {
    x = linear(x) + cache.back();
    cache.clear();
    return x;
  }
};
TESSERA_MODULE(Copier);

TEST(CopiedArguments, AreLeftAlone) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = with_values(Copier(), 5);
    fully_shard(net, mesh);
    auto x = torch::ones({2, 4}).set_requires_grad(true);
    Tensors cache = {x * 2};
    const auto before = x;
    net(x, cache).sum().backward();
    EXPECT_TRUE(x.is_same(before));
    EXPECT_EQ(cache.size(), 1U);
  });
}

// It is the caller's own object that forward changes: what leads into it stays good, also where two
// arguments are one object, and what a throw has left undone is undone.
struct ChangerOfTwoImpl : nn::Module {
  nn::Linear linear{nullptr};
  ChangerOfTwoImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
  torch::Tensor forward(torch::Tensor& a, torch::Tensor& b) {
    a = linear(a);
    return b * 2;
  }
};
TESSERA_MODULE(ChangerOfTwo);

struct SlotChangerImpl : nn::Module {
  nn::Linear linear{nullptr};
  bool throws = false;
  SlotChangerImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
  void forward(const torch::Tensor& x, Tensors& cache) {
    if (throws) throw std::runtime_error("bad batch");
    cache[1] = linear(x);
  }
};
TESSERA_MODULE(SlotChanger);

TEST(OwnArguments, OfTheCallerAreChanged) {
  run_mesh(2, [](Mesh& mesh) {
    auto two = with_values(ChangerOfTwo(), 5), alone = with_values(ChangerOfTwo(), 5);
    fully_shard(two, mesh);
    auto h = torch::ones({2, 4}).set_requires_grad(true) * 2, g = h.clone();
    EXPECT_TRUE(testing::allclose(two(h, h), alone(g, g)));
    EXPECT_TRUE(testing::allclose(h, g));

    auto slots = with_values(SlotChanger(), 5);
    fully_shard(slots, mesh);
    const auto x = torch::ones({2, 4}).set_requires_grad(true) * 3;
    Tensors cache = {x.sin(), x.cos()};
    torch::Tensor& slot = cache[1];
    const Tensors before = cache;
    slots->throws = true;
    EXPECT_THROW(slots(x, cache), std::runtime_error);
    EXPECT_TRUE(cache[0].is_same(before[0]) && cache[1].is_same(before[1]));
    abandon_step(slots);
    slots->throws = false;
    slots(x, cache);
    EXPECT_TRUE(cache[0].is_same(before[0]) && !slot.is_same(before[1]));
    slot.sum().backward();
  });
}

// What a unit casts is its caller's again where another rank leaves before it is gathered.
TEST(OwnArguments, ComeBackWhereAUnitIsNotGathered) {
  run_mesh(
      2,
      [](Mesh& mesh) {
        auto slots = with_values(SlotChanger(), 5);
        fully_shard(slots, mesh, {.mixed_precision = {.param_dtype = torch::kBFloat16}});
        if (mesh.rank() == 1) return;
        Tensors cache = {torch::ones({2, 4}), torch::ones({2, 4})};
        const Tensors before = cache;
        EXPECT_THROW(slots(torch::ones({2, 4}), cache), Error);
        EXPECT_TRUE(cache[0].is_same(before[0]) && cache[1].is_same(before[1]));
      },
      std::chrono::seconds(3));
}

}  // namespace
}  // namespace tessera
