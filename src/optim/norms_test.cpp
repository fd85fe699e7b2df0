#include "optim/norms.h"

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "conformance/errors.h"
#include "tessera/error.h"
#include "tessera/norms.h"
#include "tessera/optim.h"
#include "torch/rank_local.h"
#include "torch/testing.h"

namespace tessera {

// Norms of tensors of which ranks hold parts: those of the whole tensors, on all ranks.

namespace {

using testing::run_mesh;

constexpr double kLargest = std::numeric_limits<double>::infinity();

// Parameter `which` and its gradient, as one process has them.
torch::Tensor whole_values(int which, at::ScalarType type = at::kFloat) {
  return torch::arange(5.0 * (which + 1))
      .reshape({-1, 5})
      .mul(0.37)
      .sin()
      .mul(which - 2.5)
      .to(type);
}
torch::Tensor whole_gradient(int which, at::ScalarType type = at::kFloat) {
  return whole_values(which + 4, at::kFloat).narrow(0, 0, which + 1).to(type);
}

// The rows that this rank holds; the last ranks may have none.
torch::Tensor rows_of(const torch::Tensor& whole, const Mesh& mesh) {
  const auto rows = whole.size(0), chunk = (rows + mesh.size() - 1) / mesh.size();
  const auto begin = std::min(rows, chunk * mesh.rank());
  return whole.narrow(0, begin, std::min(chunk, rows - begin)).clone();
}

ShardedParameter part_of(int which, const Mesh& mesh, bool sharded,
                         at::ScalarType type = at::kFloat) {
  const auto part = [&](const torch::Tensor& whole) {
    return sharded ? as_rank_local(rows_of(whole, mesh)) : whole.clone();
  };
  ShardedParameter parameter;
  parameter.names = {"p" + std::to_string(which)};
  parameter.shape = whole_values(which).sizes().vec();
  parameter.local = part(whole_values(which, type)).set_requires_grad(true);
  parameter.local.mutable_grad() = part(whole_gradient(which, type));
  parameter.sharded = sharded;
  if (sharded) parameter.mesh = mesh;
  return parameter;
}

double norm_in_one_process(const std::vector<torch::Tensor>& tensors, double p) {
  std::vector<torch::Tensor> all;
  for (const auto& tensor : tensors) all.push_back(tensor.to(at::kDouble).flatten());
  return at::linalg_vector_norm(torch::cat(all), p).item<double>();
}

class Norms : public ::testing::TestWithParam<bool> {
 protected:
  static void run(int ranks, const std::function<void(Mesh&)>& body) {
    run_mesh(ranks, body, std::chrono::seconds(20), GetParam());
  }
};

TEST_P(Norms, AreThoseOfTheWholeTensorsOnAllRanks) {
  constexpr int kCount = 4;
  for (const int ranks : {1, 2, 3}) {
    for (const double p : {0.5, 1.0, 2.0, 3.0, kLargest}) {
      for (const auto of : {NormOf::parameters, NormOf::gradients}) {
        std::vector<torch::Tensor> wholes;
        for (int i = 0; i < kCount; ++i)
          wholes.push_back(of == NormOf::gradients ? whole_gradient(i) : whole_values(i));
        run(ranks, [&](Mesh& mesh) {
          std::vector<ShardedParameter> parameters;
          for (int i = 0; i < kCount; ++i) parameters.push_back(part_of(i, mesh, i != 1));
          const double expected = norm_in_one_process(wholes, p);
          EXPECT_NEAR(get_total_norm(parameters, of, p), expected, 1e-6 * expected) << p;
          const auto named = norms_by_name(parameters, of, p);
          ASSERT_EQ(named.size(), wholes.size());
          for (int i = 0; i < kCount; ++i) {
            const double one = norm_in_one_process({wholes[i]}, p);
            EXPECT_EQ(named[i].first, "p" + std::to_string(i));
            EXPECT_NEAR(named[i].second, one, 1e-6 * one) << p << " of " << i;
            EXPECT_EQ(mesh.all_reduce_max(named[i].second), named[i].second);
          }
          if (of == NormOf::gradients)
            EXPECT_EQ(clip_grad_norm(parameters, 1e9, p), get_total_norm(parameters, of, p));
        });
      }
    }
  }
}

TEST_P(Norms, TakeSeveralTypesAndMissingGradients) {
  run(2, [](Mesh& mesh) {
    std::vector<ShardedParameter> parameters{part_of(0, mesh, true, at::kBFloat16),
                                             part_of(1, mesh, true, at::kDouble),
                                             part_of(2, mesh, true)};
    parameters[1].local.mutable_grad() = at::Tensor();
    const auto first = whole_gradient(0, at::kBFloat16), last = whole_gradient(2);
    for (const double p : {2.0, kLargest}) {
      EXPECT_NEAR(get_total_norm(parameters, NormOf::gradients, p),
                  norm_in_one_process({first, last}, p), 1e-5);
      const auto named = norms_by_name(parameters, NormOf::gradients, p);
      EXPECT_NEAR(named[0].second, norm_in_one_process({first}, p), 1e-5);
      EXPECT_EQ(named[1].second, 0);
      EXPECT_NEAR(named[2].second, norm_in_one_process({last}, p), 1e-5);
    }
  });
}

TEST_P(Norms, ANumberThatIsNoneReachesAllRanksUnderItsNameAlone) {
  run(2, [](Mesh& mesh) {
    const std::vector<ShardedParameter> parameters{part_of(2, mesh, true), part_of(3, mesh, true)};
    {
      const torch::NoGradGuard no_grad;
      if (mesh.rank() == 1) parameters[0].local.fill_(std::nan(""));
    }
    for (const double p : {2.0, kLargest}) {
      EXPECT_TRUE(std::isnan(get_total_norm(parameters, NormOf::parameters, p)));
      const auto named = norms_by_name(parameters, NormOf::parameters, p);
      EXPECT_TRUE(std::isnan(named[0].second)) << p;
      EXPECT_FALSE(std::isnan(named[1].second)) << p;
      EXPECT_FALSE(std::isnan(get_total_norm(parameters, NormOf::gradients, p)));
    }
  });
}

TEST_P(Norms, OfNothingAreZero) {
  run(2, [](Mesh& mesh) {
    EXPECT_EQ(get_total_norm({}, NormOf::parameters), 0);
    EXPECT_TRUE(norms_by_name({}, NormOf::gradients).empty());
    auto without = part_of(0, mesh, true);
    without.local.mutable_grad() = at::Tensor();
    for (const double p : {2.0, kLargest}) {
      EXPECT_EQ(get_total_norm({without}, NormOf::gradients, p), 0);
      EXPECT_EQ(norms_by_name({without}, NormOf::gradients, p)[0].second, 0);
    }
  });
}

TEST_P(Norms, RefuseWhatHasNone) {
  run(2, [](Mesh& mesh) {
    const std::vector<ShardedParameter> parameters{part_of(0, mesh, true)};
    for (const double p : {0.0, -1.0, std::nan("")}) {
      EXPECT_EQ(
          code_of([&] { static_cast<void>(get_total_norm(parameters, NormOf::parameters, p)); }),
          ErrorCode::invalid_argument);
      EXPECT_EQ(
          code_of([&] { static_cast<void>(norms_by_name(parameters, NormOf::gradients, p)); }),
          ErrorCode::invalid_argument);
    }
    const std::vector<ShardedParameter> of_two{parameters[0], part_of(1, Mesh(), true)};
    EXPECT_EQ(code_of([&] { static_cast<void>(get_total_norm(of_two, NormOf::parameters)); }),
              ErrorCode::unsupported);
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Norms, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "SharedMemory" : "Gloo"; });

}  // namespace

// Norms of gradients that ranks share: the same on all of them, whatever each one holds.

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
