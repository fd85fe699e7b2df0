// Units that change their inputs in place: FSDP1 and DDP take them, as PyTorch's do, and FSDP2 does
// not. Gradients are those of one process, whoever uses the input besides.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/testing/shardings.h"
#include "tessera/fsdp.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::Sharding;
using testing::with_values;

enum class Use {
  changes,
  hands_on,
  throws_before,
  throws_behind,
  keeps,
  view,
  two_views,
  base_and_view,
  twice,
  retains,
  retains_and_changes,
  retained,
  hooks,
  hooks_and_changes
};

bool is_one_of(Use use, std::initializer_list<Use> ones) {
  return std::ranges::find(ones, use) != ones.end();
}

// Its caller's inputs are changed, watched or handed on.
struct ChangerImpl : nn::Module {
  nn::Linear linear{nullptr};
  Use use;
  bool has_thrown = false;
  double hooked = 0;  // of the gradients that the hook saw
  explicit ChangerImpl(Use use_of_input) : use(use_of_input) {
    linear = register_module("linear", nn::Linear(4, 4));
  }
  void throw_once(Use when) {  // a pass; its caller tries again
    if (use != when) return;
    has_thrown = !has_thrown;
    if (has_thrown) throw std::runtime_error("the first time");
  }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x, const torch::Tensor& z) {
    throw_once(Use::throws_before);
    if (is_one_of(use, {Use::retains, Use::retains_and_changes})) x.retain_grad();
    if (is_one_of(use, {Use::hooks, Use::hooks_and_changes})) {
      x.register_hook([this](const torch::Tensor& gradient) {
        hooked += gradient.square().sum().item<double>();
      });
    }
    if (!is_one_of(use, {Use::hands_on, Use::retains, Use::hooks})) x.mul_(1.5).add_(linear->bias);
    throw_once(Use::throws_behind);
    const auto y = linear(x) + z.tanh();
    return {y, use == Use::keeps ? y.sin() : x};
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
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& z) {
    const auto before = x * 3;
    const auto [y, same] = inner(x, z);
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
    const auto use = outer->inner->use;
    const auto wide = first(x) * 2;
    const bool is_view = is_one_of(use, {Use::view, Use::two_views});
    hidden = is_view ? wide.narrow(1, 2, 4) : wide.narrow(1, 2, 4) * 1;
    auto other = use == Use::two_views ? wide.narrow(1, 3, 4) : wide.narrow(1, 3, 4) * 1;
    if (use == Use::base_and_view) other = hidden.narrow(0, 0, 3);
    if (use == Use::twice) other = hidden;
    const auto early = hidden.tanh();  // which keeps its result, not what is changed
    if (use == Use::retained) hidden.retain_grad();
    torch::Tensor y;
    try {
      y = outer(hidden, other);
    } catch (const std::runtime_error&) {
      y = outer(hidden, other);
    }
    return (early + y + hidden.cos() + other * 0.3 + wide.mean()).square().mean();
  }
};
TESSERA_MODULE(InPlaceNet);

torch::Tensor rows_of(int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(50 + rank);
  return torch::randn({3, 4}, generator);
}

// The loss, the gradient of the input and what a hook on the input saw, of each step and rank.
std::vector<std::array<double, 3>> train_in_place(InPlaceNet& net, int first_rank, int ranks) {
  torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), 0.01);
  const bool retains = !is_one_of(net->outer->inner->use, {Use::retains, Use::retained});
  std::vector<std::array<double, 3>> seen;
  for (int step = 0; step < 3; ++step) {
    for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
      const auto loss = net(rows_of(rank));
      if (retains) net->hidden.retain_grad();
      (loss / ranks).backward();
      const auto scale = ranks * ranks;
      seen.push_back({loss.item<double>(), net->hidden.grad().square().sum().item<double>() * scale,
                      std::exchange(net->outer->inner->hooked, 0) * scale});
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return seen;
}

class InPlaceInputs : public ::testing::TestWithParam<std::tuple<Sharding, Use>> {};

TEST_P(InPlaceInputs, TrainAsInOneProcess) {
  const auto [kind, use] = GetParam();
  run_mesh(2, [&](Mesh& mesh) {
    auto alone = with_values(InPlaceNet(use), 5), net = with_values(InPlaceNet(use), 5);
    testing::shard_as(kind, {}, mesh, net, net->outer->inner, net->outer);
    const auto all = train_in_place(alone, 0, 2);
    const auto mine = train_in_place(net, mesh.rank(), 1);
    for (std::size_t step = 0; step < 3; ++step) {
      for (std::size_t what = 0; what < 3; ++what) {
        const double expected = all[2 * step + mesh.rank()][what];
        EXPECT_NEAR(mine[step][what], expected, 1e-4 + 2e-6 * std::abs(expected))
            << "number " << what << " of step " << step;
      }
    }
  });
}

std::string in_place_name(const ::testing::TestParamInfo<std::tuple<Sharding, Use>>& given) {
  constexpr const char* kUses[] = {"Changes", "HandsOn",        "ThrowsBefore",      "ThrowsBehind",
                                   "Keeps",   "View",           "TwoViews",          "BaseAndView",
                                   "Twice",   "Retains",        "RetainsAndChanges", "Retained",
                                   "Hooks",   "HooksAndChanges"};
  const auto [kind, use] = given.param;
  return testing::name_of(kind) + kUses[static_cast<int>(use)];
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, InPlaceInputs,
    ::testing::Combine(::testing::Values(Sharding::original, Sharding::flat,
                                         Sharding::original_whole, Sharding::original_hybrid,
                                         Sharding::replicate),
                       ::testing::Values(Use::changes, Use::hands_on, Use::throws_before,
                                         Use::throws_behind, Use::keeps, Use::view, Use::two_views,
                                         Use::base_and_view, Use::twice, Use::retains,
                                         Use::retains_and_changes, Use::retained, Use::hooks,
                                         Use::hooks_and_changes)),
    in_place_name);

// As PyTorch's FSDP2.
TEST(RefusedInPlaceInputs, AreThoseOfFullyShard) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = with_values(InPlaceNet(Use::changes), 5);
    fully_shard(net->outer, mesh);
    fully_shard(net, mesh);
    EXPECT_THROW(static_cast<void>(net(rows_of(0))), c10::Error);
  });
}

}  // namespace
}  // namespace tessera
