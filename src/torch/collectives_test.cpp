// Collectives of tensors for programs: values, gradients, and what is refused.
#include "tessera/collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "conformance/errors.h"
#include "tessera/error.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::run_mesh;

const std::vector<at::ScalarType> kTypes{at::kFloat,    at::kDouble, at::kHalf,
                                         at::kBFloat16, at::kLong,   at::kShort,
                                         at::kBool,     at::kByte,   at::kComplexFloat};

// A rank's tensor: other numbers on each.
torch::Tensor tensor_of_rank(int rank, at::IntArrayRef shape, at::ScalarType type) {
  const auto count = c10::multiply_integers(shape);
  const auto numbers = torch::arange(count, at::kDouble).mul(0.5).add(rank + 1).remainder(7);
  return c10::isComplexType(type) ? torch::complex(numbers, -numbers).to(type).reshape(shape)
                                  : numbers.to(type).reshape(shape);
}

// The same with memory that is not its elements in a row: turned, expanded, a conjugate.
std::vector<torch::Tensor> tensors_of_rank(int rank) {
  std::vector<torch::Tensor> all;
  for (const auto type : kTypes) {
    all.push_back(tensor_of_rank(rank, {2, 3}, type));
    all.push_back(tensor_of_rank(rank, {}, type));
    all.push_back(tensor_of_rank(rank, {0, 3}, type));
    all.push_back(tensor_of_rank(rank, {2, 3}, type).t());
    all.push_back(tensor_of_rank(rank, {1, 3}, type).expand({2, 3}));
  }
  all.push_back(tensor_of_rank(rank, {4}, at::kComplexFloat).conj());
  return all;
}

// Through shared memory, and through Gloo as between hosts.
class Collectives : public ::testing::TestWithParam<bool> {
 protected:
  static void run(int ranks, const std::function<void(Mesh&)>& body) {
    run_mesh(ranks, body, std::chrono::seconds(20), GetParam());
  }
};

TEST_P(Collectives, AllGatherGivesTheTensorsOfAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    run(ranks, [&](Mesh& mesh) {
      const auto mine = tensors_of_rank(mesh.rank());
      for (std::size_t i = 0; i < mine.size(); ++i) {
        const auto all = all_gather(mine[i], mesh);
        ASSERT_EQ(all.size(), static_cast<std::size_t>(ranks));
        for (int r = 0; r < ranks; ++r) {
          const auto expected = tensors_of_rank(r)[i];
          EXPECT_EQ(all[r].scalar_type(), expected.scalar_type()) << i;
          EXPECT_EQ(all[r].sizes(), expected.sizes()) << i;
          EXPECT_TRUE(torch::equal(all[r], expected)) << i << " of rank " << r;
        }
        // Memory of their own.
        EXPECT_FALSE(mine[i].numel() > 0 && all[mesh.rank()].is_alias_of(mine[i])) << i;
        EXPECT_FALSE(all[0].requires_grad());
      }
    });
  }
}

TEST_P(Collectives, BroadcastGivesTheTensorOfOneRank) {
  for (const int ranks : {1, 2, 3}) {
    run(ranks, [&](Mesh& mesh) {
      for (int src = 0; src < ranks; ++src) {
        auto mine = tensors_of_rank(mesh.rank());
        const auto expected = tensors_of_rank(src);
        for (std::size_t i = 0; i < mine.size(); ++i) {
          if (i < kTypes.size() * 5 && i % 5 == 4) continue;  // expanded: elements share memory
          broadcast(mine[i], src, mesh);
          EXPECT_TRUE(torch::equal(mine[i], expected[i])) << i << " from rank " << src;
        }
      }
      auto parameter = torch::full({2}, mesh.rank() + 1.0).set_requires_grad(true);
      broadcast(parameter, 0, mesh);
      EXPECT_TRUE(parameter.is_leaf());
      EXPECT_TRUE(torch::equal(parameter.detach(), torch::ones({2})));
    });
  }
}

// What rank `rank` makes of all ranks' tensors. The last rank does not use the first one.
torch::Tensor loss_of_rank(int rank, const std::vector<torch::Tensor>& all) {
  auto loss = torch::zeros({}, all[0].options());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (r == 0 && rank + 1 == static_cast<int>(all.size()) && rank > 0) continue;
    loss = loss + (rank + 1.0) * (r + 2.0) * all[r].pow(3).sum();
  }
  return c10::isComplexType(loss.scalar_type()) ? torch::real(loss) : loss;
}

// In one process that has all tensors: the gradients of the sum of all ranks' losses.
TEST_P(Collectives, GradientsOfAllGatherAreThoseOfAllRanksLosses) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kComplexFloat}) {
    for (const int ranks : {1, 2, 3}) {
      std::vector<torch::Tensor> whole;
      for (int r = 0; r < ranks; ++r)
        whole.push_back(tensor_of_rank(r, {2, 2}, type).set_requires_grad(true));
      auto loss = loss_of_rank(0, whole);
      for (int r = 1; r < ranks; ++r) loss = loss + loss_of_rank(r, whole);
      loss.backward();
      run(ranks, [&](Mesh& mesh) {
        auto mine = tensor_of_rank(mesh.rank(), {2, 2}, type).set_requires_grad(true);
        loss_of_rank(mesh.rank(), all_gather(mine, mesh)).backward();
        const double close = type == at::kBFloat16 ? 5e-2 : type == at::kHalf ? 1e-2 : 1e-6;
        EXPECT_TRUE(torch::allclose(mine.grad(), whole[mesh.rank()].grad(), close, close))
            << type << "\n"
            << mine.grad() << "\n"
            << whole[mesh.rank()].grad();
      });
    }
  }
}

// d/dx of (d/dx sum of x^3)^2 over all ranks.
TEST_P(Collectives, GradientsOfGradientsTravelToo) {
  run(2, [](Mesh& mesh) {
    auto x = torch::full({2}, mesh.rank() + 1.0, at::kDouble).set_requires_grad(true);
    const auto all = all_gather(x, mesh);
    const auto loss = all[0].pow(3).sum() + all[1].pow(3).sum();
    // On two ranks 2 * 3x^2; its square has the slope 2 * 6x^2 * 12x, of this rank's loss alone.
    const auto first = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
    EXPECT_TRUE(torch::allclose(first, 6 * x.square()));
    first.square().sum().backward();
    EXPECT_TRUE(torch::allclose(x.grad(), 144 * x.detach().pow(3))) << x.grad();
  });
}

TEST_P(Collectives, RanksThatDifferAreTold) {
  const auto differ = [&](const std::function<void(Mesh&)>& call, const char* what) {
    run(2, [&](Mesh& mesh) {
      const auto error = error_of([&] { call(mesh); });
      EXPECT_EQ(error.code(), ErrorCode::mismatch) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(what));
    });
  };
  differ(
      [](Mesh& mesh) {
        static_cast<void>(all_gather(
            torch::ones(mesh.rank() == 0 ? at::IntArrayRef{2, 3} : at::IntArrayRef{3, 2}), mesh));
      },
      "[2, 3]");
  differ(
      [](Mesh& mesh) {
        static_cast<void>(
            all_gather(torch::ones({4}, mesh.rank() == 0 ? at::kFloat : at::kInt), mesh));
      },
      "Float");
  differ([](Mesh& mesh) { broadcast(torch::ones({4}), mesh.rank(), mesh); }, "from rank 1");
  differ([](Mesh& mesh) { broadcast(torch::ones({4 + mesh.rank()}), 0, mesh); }, "Float [5]");
  differ(
      [](Mesh& mesh) {
        if (mesh.rank() == 0) barrier(mesh);
        if (mesh.rank() == 1) static_cast<void>(all_gather(torch::ones({1}), mesh));
      },
      "barrier");
}

TEST_P(Collectives, WhatCannotTravelIsRefusedOnTheSpot) {
  for (const int ranks : {1, 2}) {
    run(ranks, [&](Mesh& mesh) {
      const auto sparse = torch::ones({2, 2}).to_sparse();
      EXPECT_EQ(code_of([&] { static_cast<void>(all_gather({}, mesh)); }),
                ErrorCode::invalid_argument);
      EXPECT_EQ(code_of([&] { static_cast<void>(all_gather(sparse, mesh)); }),
                ErrorCode::unsupported);
      EXPECT_EQ(code_of([&] { broadcast({}, 0, mesh); }), ErrorCode::invalid_argument);
      torch::Tensor nothing;
      EXPECT_EQ(code_of([&] { mesh.all_reduce_sum(nothing); }), ErrorCode::invalid_argument);
      EXPECT_EQ(code_of([&] { broadcast(sparse, 0, mesh); }), ErrorCode::unsupported);
      for (const int nobody : {-1, ranks}) {
        EXPECT_EQ(code_of([&] { broadcast(torch::ones({2}), nobody, mesh); }),
                  ErrorCode::invalid_argument);
      }
      EXPECT_EQ(all_gather(torch::ones({1}), mesh).size(), ranks);  // the mesh is whole
    });
  }
}

TEST_P(Collectives, ABarrierWaitsForAll) {
  for (const int ranks : {1, 3}) {
    std::atomic<int> arrived = 0;
    run(ranks, [&](Mesh& mesh) {
      if (mesh.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ++arrived;
      barrier(mesh);
      EXPECT_EQ(arrived, ranks);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Collectives, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "SharedMemory" : "Gloo"; });

}  // namespace
}  // namespace tessera
