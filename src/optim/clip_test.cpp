// Norms of gradients that ranks share: the same on all of them, whatever each one holds.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tessera/optim.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::run_mesh;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A parameter with this gradient; with `mesh` what this rank holds of one that is sharded.
ShardedParameter parameter_of(const std::string& name, const at::Tensor& gradient,
                              const std::optional<Mesh>& mesh = {}) {
  auto local = torch::zeros_like(gradient).set_requires_grad(true);
  local.mutable_grad() = gradient.clone();
  ShardedParameter parameter;
  parameter.names = {name};
  parameter.shape = gradient.sizes().vec();
  parameter.local = local;
  parameter.sharded = mesh.has_value();
  parameter.mesh = mesh;
  return parameter;
}

at::Tensor gradient(int rank, int which, at::ScalarType type) {
  auto values = torch::arange(1, 6, torch::kDouble).mul_(0.3 * (rank + 1) * (which + 1));
  return c10::isComplexType(type) ? torch::complex(values, values.flip(0)).to(type)
                                  : values.to(type);
}

// Each rank as its own kind of transport has it: shared memory, and Gloo as between hosts.
class ClipGradNorm : public ::testing::TestWithParam<bool> {
 protected:
  static void run(int ranks, const std::function<void(Mesh&)>& body) {
    run_mesh(ranks, body, std::chrono::seconds(10), GetParam());
  }
};

TEST_P(ClipGradNorm, ANumberThatIsNoneReachesEveryRank) {
  for (const int ranks : {2, 3}) {
    for (int bad = 0; bad < ranks; ++bad) {
      run(ranks, [&](Mesh& mesh) {
        const double mine = mesh.rank() == bad ? std::nan("") : 1.0 + mesh.rank();
        EXPECT_TRUE(std::isnan(mesh.all_reduce_max(mine))) << ranks << " ranks, of rank " << bad;
        for (const double p : {2.0, kInfinity}) {
          std::vector<ShardedParameter> parameters{
              parameter_of("a", torch::ones({3}), mesh),
              parameter_of("b", torch::full({3}, mine, torch::kFloat), mesh)};
          EXPECT_TRUE(std::isnan(clip_grad_norm(parameters, 1.0, p))) << p;
          // As torch: whoever looks at a gradient sees it.
          EXPECT_TRUE(parameters[0].local.grad().isnan().all().item<bool>()) << p;
        }
      });
    }
  }
}

// Those that every rank holds whole are looked at beside the shards.
TEST_P(ClipGradNorm, ANumberThatIsNoneInAWholeGradientStays) {
  run(2, [&](Mesh& mesh) {
    for (const double p : {2.0, kInfinity}) {
      const std::vector<ShardedParameter> parameters{
          parameter_of("a", torch::ones({3}), mesh),
          parameter_of("b", torch::full({3}, std::nan(""), torch::kFloat))};
      EXPECT_TRUE(std::isnan(clip_grad_norm(parameters, 1.0, p))) << p;
    }
  });
}

TEST_P(ClipGradNorm, TheLargestOfNumbersIsWhatItWas) {
  run(3, [](Mesh& mesh) {
    EXPECT_EQ(mesh.all_reduce_max(-2.0 - mesh.rank()), -2);
    EXPECT_EQ(mesh.all_reduce_max(mesh.rank() == 1 ? kInfinity : 0), kInfinity);
    EXPECT_EQ(mesh.all_reduce_max(-kInfinity), -kInfinity);
  });
}

// A rank may hold nothing of the first parameter, and then begins with one of another type.
TEST_P(ClipGradNorm, TakesGradientsOfSeveralTypes) {
  const std::vector<at::ScalarType> types{torch::kFloat, torch::kDouble, torch::kComplexFloat,
                                          torch::kBFloat16, torch::kComplexDouble};
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    for (std::size_t first = 0; first < types.size(); ++first) {
      const auto type_of = [&](std::size_t i) { return types[(first + i) % types.size()]; };
      std::vector<at::Tensor> whole;  // of one process, whose sums are not rounded to short types
      for (int rank = 0; rank < 2; ++rank) {
        for (std::size_t i = 0; i < types.size(); ++i) {
          if (rank == 1 && i == 0) continue;
          const auto type = type_of(i);
          const auto wide = c10::isComplexType(type) ? torch::kComplexDouble : torch::kDouble;
          auto parameter = torch::zeros({5}, wide).set_requires_grad(true);
          parameter.mutable_grad() = gradient(rank, static_cast<int>(i), type).to(wide);
          whole.push_back(parameter);
        }
      }
      const double expected = torch::nn::utils::clip_grad_norm_(whole, 1e9, p);
      run(2, [&](Mesh& mesh) {
        std::vector<ShardedParameter> parameters;
        for (std::size_t i = 0; i < types.size(); ++i) {
          auto mine = gradient(mesh.rank(), static_cast<int>(i), type_of(i));
          if (mesh.rank() == 1 && i == 0) mine = mine.narrow(0, 0, 0);
          parameters.push_back(parameter_of(std::to_string(i), mine, mesh));
        }
        EXPECT_NEAR(clip_grad_norm(parameters, 1.0, p), expected, 1e-5 * expected)
            << p << " " << c10::toString(type_of(0));
        const auto clipped = clip_grad_norm(parameters, 1.0, p);
        EXPECT_NEAR(clipped, 1, 0.01) << p << " " << c10::toString(type_of(0));
      });
    }
  }
}

// That a gradient is the conjugate or the negative of its memory is a bit beside it.
TEST(ClipLazyBits, TakesConjugatedAndNegatedGradients) {
  for (const bool is_complex : {true, false}) {
    const auto type = is_complex ? torch::kComplexDouble : torch::kDouble;
    const auto plain = parameter_of("plain", gradient(0, 0, type));
    const auto lazy = parameter_of("lazy", gradient(0, 0, type));
    auto& lazy_grad = lazy.local.mutable_grad();
    lazy_grad = is_complex ? lazy_grad.conj() : at::_neg_view(lazy_grad);
    const auto expected = (is_complex ? plain.local.grad().conj() : -plain.local.grad()).clone();
    const double norm = clip_grad_norm({plain}, 0.5);
    EXPECT_EQ(clip_grad_norm({lazy}, 0.5), norm);
    EXPECT_TRUE(torch::allclose(lazy.local.grad(), expected * (0.5 / (norm + 1e-6))));
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, ClipGradNorm, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "SharedMemory" : "Gloo"; });

}  // namespace
}  // namespace tessera
