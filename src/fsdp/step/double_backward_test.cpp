// Gradients of gradients, as a gradient penalty has them: right where parameters stay gathered, and
// told by their name elsewhere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <exception>
#include <string>
#include <vector>

#include "fsdp/testing/test_model.h"
#include "tessera/fsdp.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::run_mesh;
using testing::TanhStack;
using testing::with_values;

torch::Tensor penalized_loss(TanhStack& net, int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(80 + rank);
  const auto x =
      torch::randn({3, 4}, generator).to(net->out->weight.device()).set_requires_grad(true);
  const auto y = net(x);
  const auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
  return y.mean() + (gradient.square().sum(1).sqrt() - 1).square().mean();
}

std::vector<double> train_penalized(TanhStack& net, int first_rank, int ranks) {
  torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), 0.1);
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
      const auto loss = penalized_loss(net, rank);
      (loss / ranks).backward();
      losses.push_back(loss.item<double>());
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

TEST(DoubleBackward, IsRightWhereParametersStay) {
  run_mesh(2, [](Mesh& mesh) {
    auto alone = with_values(TanhStack(), 5);
    const auto all = train_penalized(alone, 0, 2);
    const ShardOptions stays{.reshard_after_forward = false, .reshard_after_backward = false};
    for (const std::string kind : {"one unit", "units", "replicate", "replicated units"}) {
      auto net = with_values(TanhStack(), 5);
      if (kind == "replicated units") replicate(net->first, mesh);
      if (kind == "units") fully_shard(net->first, mesh, stays);
      if (kind.ends_with("unit") || kind == "units") fully_shard(net, mesh, stays);
      if (kind.starts_with("replicate")) replicate(net, mesh);
      const auto mine = train_penalized(net, mesh.rank(), 1);
      for (int step = 0; step < 3; ++step)
        EXPECT_NEAR(mine[step], all[2 * step + mesh.rank()], 1e-5) << kind << ", step " << step;
    }
  });
}

TEST(DoubleBackward, IsNamedWhereParametersAreFreed) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = with_values(TanhStack(), 5);
    fully_shard(net->first, mesh);
    fully_shard(net->second, mesh);
    fully_shard(net, mesh);
    try {
      penalized_loss(net, mesh.rank()).backward();
      ADD_FAILURE() << "went through";
    } catch (const std::exception& error) {  // libtorch's, of a storage without memory
      EXPECT_THAT(error.what(), HasSubstr("gradients of gradients"));
    }
    abandon_step(net);
    EXPECT_NO_THROW(net(torch::ones({2, 4})).sum().backward());
  });
}

}  // namespace
}  // namespace tessera
