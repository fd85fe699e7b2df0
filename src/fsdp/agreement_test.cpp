// What has to be alike on all ranks, or alike in the module and in its shards: where it is not, an
// error says what, and no rank goes on with wrong numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "fsdp/test_training.h"
#include "tessera/error.h"
#include "tessera/full_params.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/train_state.h"
#include "tessera/unit_controls.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::run_mesh;
using testing::with_values;

template <typename Model>
void backward_of(Model& net, const Mesh& mesh, int number = 0) {
  loss_of(net, batch_of(number, 0, mesh)).backward();
}

torch::Tensor local_of(ModuleRef module, const std::string& name) {
  for (const auto& parameter : sharded_parameters(module)) {
    if (parameter.name() == name) return parameter.local;
  }
  throw std::out_of_range(name);
}

// Which unit --------------------------------------------------------------------------------------

// Gathers match by order, and evaluation does not compare it first.
TEST(ForwardOrder, ThatDiffersInEvaluationIsAnErrorOfTheGathers) {
  for (const int ranks : {2, 3}) {
    run_mesh(ranks, [&](Mesh& mesh) {
      auto net = make_net({.blocks = 2});
      testing::shard(net, mesh);
      const torch::NoGradGuard evaluate;
      if (mesh.rank() == 1) std::swap(net->blocks[0], net->blocks[1]);  // of equal sizes
      const auto text = error_of([&] { loss_of(net, batch(0, 0, 1)); });
      EXPECT_THAT(text, HasSubstr("mismatch"));
      EXPECT_THAT(text, HasSubstr("gather of"));
      EXPECT_THAT(text, HasSubstr("'block0'"));
      EXPECT_THAT(text, HasSubstr("'block1'"));
    });
  }
}

TEST(ForwardOrder, IsComparedOverCopiesToo_EO3) {
  run_mesh(4, [](Mesh& mesh) {
    const auto hybrid = mesh.split(2);
    auto net = make_net({.blocks = 2});
    for (auto& block : net->blocks) fully_shard(block, hybrid);
    fully_shard(net, hybrid);
    if (mesh.rank() >= 2) std::swap(net->blocks[0], net->blocks[1]);  // a whole copy
    EXPECT_THAT(error_of([&] { backward_of(net, mesh); }),
                HasSubstr("Forward order differs across ranks: rank 0 is all-gathering parameters "
                          "for unit 'block0' while rank 2"));
  });
}

// Parameters of equal sizes: what waits could be added to the other one's.
TEST(UnitControls, SumsThatWaitKnowWhoseTheyAre_F25) {
  run_mesh(4, [](Mesh& mesh) {
    const auto hybrid = mesh.split(2);
    torch::nn::Linear linear(torch::nn::LinearOptions(4, 4).bias(false));
    torch::nn::Linear second(torch::nn::LinearOptions(4, 4).bias(false));
    torch::nn::Sequential both(linear, second);
    fully_shard(both, hybrid);
    linear->weight.set_requires_grad(false);
    set_requires_all_reduce(both, false);
    const auto backward = [&] { call(both, torch::ones({1, 4})).sum().backward(); };
    backward();
    linear->weight.set_requires_grad(true);
    second->weight.set_requires_grad(false);
    set_requires_all_reduce(both, true);
    EXPECT_THAT(error_of(backward), HasSubstr("frozen or thawed between backwards"));
  });
}

// What is frozen ----------------------------------------------------------------------------------

TEST(Frozen, DifferentlyIsAnErrorWhenAUnitIsMade) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    if (mesh.rank() == 1) net->blocks[0]->up->bias.requires_grad_(false);
    EXPECT_THAT(error_of([&] { fully_shard(net->blocks[0], mesh); }),
                HasSubstr("names, shapes, dtypes or in what is frozen"));
  });
}

TEST(Frozen, DifferentlyIsAnErrorInTheFirstPassThatNamesTheParameter) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    auto& norm = net->blocks[1]->norm;  // two parameters of one size
    (mesh.rank() == 0 ? norm->weight : norm->bias).requires_grad_(false);
    const auto text = error_of([&] { backward_of(net, mesh); });
    EXPECT_THAT(text, HasSubstr("mismatch"));
    EXPECT_THAT(text, HasSubstr("block1.norm.weight"));
    EXPECT_THAT(text, HasSubstr("do not both train"));
    reset(net);
    (mesh.rank() == 0 ? norm->bias : norm->weight).requires_grad_(false);
    EXPECT_EQ(error_of([&] { backward_of(net, mesh); }), "no Error");
  });
}

class FrozenLater : public ::testing::TestWithParam<std::pair<const char*, at::ScalarType>> {};

// Gradients of parameters of one size would be averaged with each other's.
TEST_P(FrozenLater, DifferentlyIsAnErrorOnAllRanks) {
  const std::string kind = GetParam().first;
  const auto reduce_dtype = GetParam().second;
  run_mesh(2, [&](Mesh& mesh) {
    auto net = make_net({.blocks = 1});
    const ShardOptions options{.mixed_precision = {.reduce_dtype = reduce_dtype}};
    std::unique_ptr<FullyShardedDataParallel<testing::Net>> wrapped;
    if (kind == "rows") fully_shard(net, mesh, options);
    if (kind == "replicate") replicate(net, mesh);
    if (kind == "flat_original")
      wrapped = std::make_unique<FullyShardedDataParallel<testing::Net>>(
          net, mesh,
          FullyShardedOptions{.mixed_precision = {.reduce_dtype = reduce_dtype},
                              .use_orig_params = true});
    auto& norm = net->blocks[0]->norm;
    backward_of(net, mesh);
    (mesh.rank() == 0 ? norm->weight : norm->bias).requires_grad_(false);
    const auto text = error_of([&] { backward_of(net, mesh, 1); });
    EXPECT_THAT(text, HasSubstr("mismatch"));
    EXPECT_THAT(text, HasSubstr("require gradients of different parameters"));
  });
}
INSTANTIATE_TEST_SUITE_P(All, FrozenLater,
                         ::testing::Values(std::pair{"rows", at::kFloat},
                                           std::pair{"rows", at::kBFloat16},
                                           std::pair{"flat_original", at::kFloat},
                                           std::pair{"replicate", at::kFloat}),
                         [](const auto& info) {
                           return std::string(info.param.first) + c10::toString(info.param.second);
                         });

}  // namespace
}  // namespace tessera
