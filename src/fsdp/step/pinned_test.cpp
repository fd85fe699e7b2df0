// What unshard() and start_unshard() keep gathered while shards change: all ranks compute with the
// same values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/testing/test_values.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/full_params.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::with_values;

// One row: rank 0 alone holds something of it.
struct RowImpl : nn::Module {
  nn::Linear linear{nullptr};
  RowImpl() { linear = register_module("linear", nn::Linear(4, 1)); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x).square().mean(); }
};
TESSERA_MODULE(Row);

torch::Tensor ones() {
  return torch::ones({2, 4});
}

double loss_of(Row& row) {
  const torch::NoGradGuard no_grad;
  return row(ones()).item<double>();
}

class Pinned : public ::testing::TestWithParam<bool> {
 protected:
  static void run(int ranks, const std::function<void(Mesh&)>& body) {
    run_mesh(ranks, body, std::chrono::seconds(10), GetParam());
  }
  static void expect_everywhere(const Mesh& mesh, double mine, double expected, const char* what) {
    EXPECT_NEAR(mine, expected, 1e-5) << what << ", rank " << mesh.rank();
  }
};

TEST_P(Pinned, ValuesThatOneRankAloneHoldsAreGatheredByAll) {
  for (const int ranks : {2, 3}) {
    run(ranks, [](Mesh& mesh) {
      auto alone = with_values(Row(), 3), row = with_values(Row(), 3);
      fully_shard(row, mesh);
      unshard(row);
      alone->linear->bias.set_data(torch::full({1}, 9.F));
      row->linear->bias.set_data(torch::full({1}, 9.F));
      expect_everywhere(mesh, loss_of(row), loss_of(alone), "set_data");
      expect_everywhere(mesh, loss_of(row), loss_of(alone), "once more");

      alone->linear->weight.set_data(torch::full({1, 4}, 0.5F));
      load_full_state_dict(row, alone->named_parameters());
      expect_everywhere(mesh, loss_of(row), loss_of(alone), "load_full_state_dict");
    });
  }
}

// By an operator on the part that one rank holds.
TEST_P(Pinned, OneRanksOwnChangeIsSeenByAll) {
  run(2, [](Mesh& mesh) {
    auto alone = with_values(Row(), 3), row = with_values(Row(), 3);
    fully_shard(row, mesh);
    unshard(row);
    {
      const torch::NoGradGuard no_grad;
      alone->linear->weight.mul_(2);
      if (mesh.rank() == 0) sharded_parameters(row)[0].local.mul_(2);
    }
    expect_everywhere(mesh, loss_of(row), loss_of(alone), "mul_");
  });
}

// Nothing is gathered for a pass after which nobody has changed anything.
TEST_P(Pinned, WhatNobodyChangedStays) {
  run(2, [](Mesh& mesh) {
    auto row = with_values(Row(), 3);
    fully_shard(row, mesh);
    unshard(row);
    const auto gathers = unit_reports(row)[0].gathers;
    for (int i = 0; i < 3; ++i) static_cast<void>(loss_of(row));
    EXPECT_EQ(unit_reports(row)[0].gathers, gathers);
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Pinned, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "SharedMemory" : "Gloo"; });

}  // namespace
}  // namespace tessera
