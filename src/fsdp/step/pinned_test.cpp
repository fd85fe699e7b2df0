// What unshard() and start_unshard() keep gathered while shards change: all ranks compute with the
// same values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/trace.h"
#include "tessera/unit_controls.h"
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
      row->linear->bias.set_data(torch::full({1}, 9.F, mesh.device()));
      expect_everywhere(mesh, loss_of(row), loss_of(alone), "set_data");
      expect_everywhere(mesh, loss_of(row), loss_of(alone), "once more");

      alone->linear->weight.set_data(torch::full({1, 4}, 0.5F));
      load_full_state_dict(row, alone->named_parameters());
      expect_everywhere(mesh, loss_of(row), loss_of(alone), "load_full_state_dict");
    });
  }
}

// An operator changes the part that one rank holds.
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

struct WideImpl : nn::Module {
  nn::Linear a{nullptr}, b{nullptr};
  WideImpl() {
    a = register_module("a", nn::Linear(300, 300));
    b = register_module("b", nn::Linear(300, 300));
  }
  torch::Tensor forward(const torch::Tensor& x) { return b(call_module(a, x)).square().mean(); }
};
TESSERA_MODULE(Wide);

std::map<std::string, torch::Tensor> values_of(const nn::Module& module) {
  std::map<std::string, torch::Tensor> values;
  for (const auto& entry : module.named_parameters())
    values[entry.key()] = entry.value().detach().clone();
  return values;
}

// PyTorch's all-gather copies the shards before it returns: an optimizer may go on.
template <typename Step>
void expect_values_from_before(const Mesh& mesh, const ShardOptions& options, const Step& step) {
  auto wide = with_values(Wide(), 5);
  const auto before = values_of(*wide);
  fully_shard(wide->a, mesh, options);
  fully_shard(wide, mesh, options);
  const auto x = torch::ones({2, 300});
  wide(x).backward();
  auto handle = start_unshard(wide);
  step(sharded_parameters(wide));
  handle.wait();
  for (const auto& [name, value] : values_of(*wide)) {
    EXPECT_TRUE(testing::equal(value, before.at(name).to(value.scalar_type())))
        << name << ", rank " << mesh.rank();
  }
  reshard(wide);
  const torch::NoGradGuard no_grad;
  const double loss = wide(x).item<double>();
  EXPECT_EQ(mesh.all_reduce_max(loss), -mesh.all_reduce_max(-loss));
}

TEST_P(Pinned, AnOptimizerMayStepWhileAGatherIsUnderWay) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    run(3, [&](Mesh& mesh) {
      const ShardOptions options{.mixed_precision = {.param_dtype = dtype}};
      expect_values_from_before(mesh, options, [](const auto& parameters) {
        torch::optim::SGD(local_tensors(parameters), 0.5).step();
      });
      expect_values_from_before(mesh, options, [](const auto& parameters) {
        AdamW optimizer(parameters, {.lr = 0.5});
        optimizer.step();
      });
    });
  }
}

// Calls `b` where it is asked to.
struct SkippingImpl : nn::Module {
  nn::Linear a{nullptr}, b{nullptr};
  SkippingImpl() {
    a = register_module("a", nn::Linear(300, 300));
    b = register_module("b", nn::Linear(300, 300));
  }
  torch::Tensor forward(const torch::Tensor& x, bool with_b) {
    const auto y = call_module(a, x);
    return (with_b ? call_module(b, y) : y).square().mean();
  }
};
TESSERA_MODULE(Skipping);

// Whatever the model does between the start and the wait.
TEST_P(Pinned, AGatherUnderWayKeepsTheValuesOfItsMoment) {
  for (const bool trains : {false, true}) {
    run(2, [trains](Mesh& mesh) {
      auto net = with_values(Skipping(), 5);
      const auto before = values_of(*net->b);
      for (auto part : {net->a, net->b}) fully_shard(part, mesh);
      fully_shard(net, mesh);
      const auto x = torch::ones({2, 300});
      const auto loss = net(x, false);
      auto handle = start_unshard(net->b);
      if (trains) {
        loss.backward();
      } else {
        const torch::NoGradGuard no_grad;
        static_cast<void>(net(x, false));
      }
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : sharded_parameters(net->b)) parameter.local.mul_(2);
      }
      handle.wait();
      for (const auto& [name, value] : values_of(*net->b))
        EXPECT_TRUE(testing::equal(value, before.at(name))) << name << ", rank " << mesh.rank();
    });
  }
}

// torch::optim::SGD writes through data(), which leaves no version behind.
TEST_P(Pinned, AStepThatLeavesNoVersionIsSeen) {
  for (const bool starts : {false, true}) {
    run(2, [starts](Mesh& mesh) {
      auto alone = with_values(Row(), 3), row = with_values(Row(), 3);
      fully_shard(row, mesh);
      torch::optim::SGD mine(local_tensors(sharded_parameters(row)), 0.1);
      torch::optim::SGD other(alone->parameters(), 0.1);
      row(ones()).backward();
      alone(ones()).backward();
      std::optional<UnshardHandle> handle;
      if (starts) handle = start_unshard(row);
      if (!starts) unshard(row);
      mine.step();
      other.step();
      if (handle) handle->wait();
      expect_everywhere(mesh, loss_of(row), loss_of(alone), starts ? "start_unshard" : "unshard");
    });
  }
}

// A unit over pairs of ranks and one over all of them: each compares among its own.
struct RowsImpl : nn::Module {
  Row pair{nullptr}, all{nullptr};
  RowsImpl() {
    pair = register_module("pair", Row());
    all = register_module("all", Row());
  }
  torch::Tensor forward(const torch::Tensor& x) { return pair(x) + all(x); }
};
TESSERA_MODULE(Rows);

TEST_P(Pinned, UnitsOfSeveralMeshesAskTheirOwnRanks) {
  run(4, [](Mesh& mesh) {
    auto alone = with_values(Rows(), 3), rows = with_values(Rows(), 3);
    fully_shard(rows->pair, mesh.split(2).shard);
    fully_shard(rows->all, mesh);
    fully_shard(rows, mesh);
    const torch::NoGradGuard no_grad;
    (void)rows(ones());
    unshard(rows->pair);
    unshard(rows->all);
    alone->all->linear->bias.add_(1);
    // Rank 0 has the only row.
    for (auto& parameter : sharded_parameters(rows->all)) {
      if (mesh.rank() == 0 && parameter.name() == "linear.bias") parameter.local.add_(1);
    }
    expect_everywhere(mesh, rows(ones()).item<double>(), alone(ones()).item<double>(), "pairs");
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Pinned, ::testing::Bool(),
                         [](const auto& kind) { return kind.param ? "SharedMemory" : "Gloo"; });

}  // namespace
}  // namespace tessera
