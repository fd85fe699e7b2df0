// Units that change their inputs in place: FSDP1 and DDP take them, as PyTorch's do, and FSDP2 does
// not. Gradients are those of one process, whoever uses the input besides.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/testing/test_values.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::with_values;

enum class Use { changes, hands_on, throws_once, view };

// The inner block changes what the outer one was given.
struct ChangerImpl : nn::Module {
  nn::Linear linear{nullptr};
  Use use;
  bool has_thrown = false;
  explicit ChangerImpl(Use use_of_input) : use(use_of_input) {
    linear = register_module("linear", nn::Linear(4, 4));
  }
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    if (use == Use::throws_once && !std::exchange(has_thrown, true))
      throw std::runtime_error("the first time");
    if (use != Use::hands_on) x.mul_(1.5).add_(linear->bias);
    return {linear(x), x};
  }
};
TESSERA_MODULE(Changer);

struct OuterImpl : nn::Module {
  Changer inner{nullptr};
  torch::Tensor scale;
  explicit OuterImpl(Use use) {
    inner = register_module("inner", Changer(use));
    scale = register_parameter("scale", torch::full({4}, 0.7));
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto before = x * 3;
    const auto [y, same] = inner(x);
    return before + y * scale + same + x.sin();
  }
};
TESSERA_MODULE(Outer);

struct InPlaceNetImpl : nn::Module {
  nn::Linear first{nullptr};
  Outer outer{nullptr};
  torch::Tensor hidden;  // of the last forward
  explicit InPlaceNetImpl(Use use) {
    first = register_module("first", nn::Linear(4, 8));
    outer = register_module("outer", Outer(use));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto wide = first(x) * 2;
    const bool is_view = outer->inner->use == Use::view;
    hidden = is_view ? wide.narrow(1, 2, 4) : wide.narrow(1, 2, 4) * 1;
    const auto early = hidden.tanh();  // which keeps its result, not what is changed
    torch::Tensor y;
    try {
      y = outer(hidden);
    } catch (const std::runtime_error&) {
      y = outer(hidden);
    }
    return (early + y + hidden.cos() + wide.mean()).square().mean();
  }
};
TESSERA_MODULE(InPlaceNet);

enum class InPlaceKind { original, flat, no_shard, hybrid, replicate };

void wrap_in_place(InPlaceNet& net, const Mesh& mesh, InPlaceKind kind) {
  if (kind == InPlaceKind::replicate) {
    replicate(net->outer->inner, mesh);
    replicate(net->outer, mesh);
    return replicate(net, mesh);
  }
  const FullyShardedOptions options{
      .sharding_strategy = kind == InPlaceKind::no_shard ? ShardingStrategy::no_shard
                           : kind == InPlaceKind::hybrid ? ShardingStrategy::hybrid_shard
                                                         : ShardingStrategy::full_shard,
      .auto_wrap_policy = module_wrap_policy<ChangerImpl, OuterImpl>(),
      .use_orig_params = kind != InPlaceKind::flat};
  if (kind == InPlaceKind::hybrid) {
    const FullyShardedDataParallel<InPlaceNet> wrapped(net, mesh.split(1), options);
  } else {
    const FullyShardedDataParallel<InPlaceNet> wrapped(net, mesh, options);
  }
}

torch::Tensor rows_of(int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(50 + rank);
  return torch::randn({3, 4}, generator);
}

std::vector<double> train_in_place(InPlaceNet& net, int first_rank, int ranks) {
  torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), 0.01);
  std::vector<double> seen;
  for (int step = 0; step < 3; ++step) {
    for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
      const auto loss = net(rows_of(rank));
      net->hidden.retain_grad();
      (loss / ranks).backward();
      seen.push_back(loss.item<double>());
      seen.push_back(net->hidden.grad().square().sum().item<double>() * ranks * ranks);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return seen;
}

class InPlaceInputs : public ::testing::TestWithParam<std::tuple<InPlaceKind, Use>> {};

TEST_P(InPlaceInputs, TrainAsInOneProcess) {
  const auto [kind, use] = GetParam();
  run_mesh(2, [&](Mesh& mesh) {
    auto alone = with_values(InPlaceNet(use), 5), net = with_values(InPlaceNet(use), 5);
    wrap_in_place(net, mesh, kind);
    const auto all = train_in_place(alone, 0, 2);
    const auto mine = train_in_place(net, mesh.rank(), 1);
    for (std::size_t step = 0; step < 3; ++step) {
      for (std::size_t what = 0; what < 2; ++what) {
        EXPECT_NEAR(mine[2 * step + what], all[4 * step + 2 * mesh.rank() + what], 1e-4)
            << (what == 0 ? "loss" : "gradient of the input") << " of step " << step;
      }
    }
  });
}

std::string in_place_name(const ::testing::TestParamInfo<std::tuple<InPlaceKind, Use>>& given) {
  constexpr const char* kKinds[] = {"Original", "Flat", "NoShard", "Hybrid", "Replicate"};
  constexpr const char* kUses[] = {"Changes", "HandsOn", "ThrowsOnce", "View"};
  const auto [kind, use] = given.param;
  return std::string(kKinds[static_cast<int>(kind)]) + kUses[static_cast<int>(use)];
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, InPlaceInputs,
    ::testing::Combine(::testing::Values(InPlaceKind::original, InPlaceKind::flat,
                                         InPlaceKind::no_shard, InPlaceKind::hybrid,
                                         InPlaceKind::replicate),
                       ::testing::Values(Use::changes, Use::hands_on, Use::throws_once, Use::view)),
    in_place_name);

// As PyTorch's FSDP2. A gradient that is retained before would be that of another history.
TEST(RefusedInPlaceInputs, AreRefusedByAutogradWhereTheyAreViews) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = with_values(InPlaceNet(Use::changes), 5);
    fully_shard(net->outer, mesh);
    fully_shard(net, mesh);
    EXPECT_THROW(static_cast<void>(net(rows_of(0))), c10::Error);
    auto changer = with_values(Changer(Use::changes), 5);
    replicate(changer, mesh);
    auto x = torch::ones({2, 4}).set_requires_grad(true) * 2;
    x.retain_grad();
    EXPECT_THROW(static_cast<void>(changer(x)), c10::Error);
  });
}

}  // namespace
}  // namespace tessera
