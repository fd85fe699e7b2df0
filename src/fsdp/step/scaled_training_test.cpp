// Trainings of sharded models with a scaled loss (spec 6.20).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "fsdp/testing/test_model.h"
#include "tessera/fsdp.h"
#include "tessera/grad_scaler.h"
#include "tessera/optim.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::run_mesh;

const MixedPrecision kHalf{.param_dtype = torch::kHalf};

testing::Net sharded_net(const Mesh& mesh, const MixedPrecision& precision) {
  auto net = testing::make_net({});
  for (auto& block : net->blocks) fully_shard(block, mesh, {.mixed_precision = precision});
  fully_shard(net, mesh, {.mixed_precision = precision});
  return net;
}

// To predict the next token of a cycle; ranks begin at different places.
torch::Tensor loss_of(testing::Net& net, const Mesh& mesh) {
  const auto tokens = torch::arange(mesh.rank(), mesh.rank() + 6) % testing::kVocabulary;
  const auto logits = net(tokens).to(torch::kFloat);
  return torch::cross_entropy_loss(logits, (tokens + 1).to(mesh.device()) % testing::kVocabulary);
}

struct ScaledRun {
  std::vector<double> losses;
  std::vector<bool> stepped;
  double scale = 0;  // the last
  [[nodiscard]] int skipped() const {
    return static_cast<int>(std::count(stepped.begin(), stepped.end(), false));
  }
};

// `dim` multiplies the loss before its backward, as a model with small gradients would.
template <typename Optimizer>
ScaledRun train(testing::Net& net, const Mesh& mesh, Optimizer& optimizer,
                ShardedGradScaler& scaler, double dim = 1) {
  ScaledRun training;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    auto loss = loss_of(net, mesh);
    scaler.scale(loss * dim).backward();
    training.stepped.push_back(scaler.step(optimizer));
    scaler.update();
    training.losses.push_back(loss.template item<double>());
  }
  training.scale = scaler.get_scale();
  return training;
}

ScaledRun train_adamw(const Mesh& mesh, const MixedPrecision& precision,
                      const GradScalerOptions& options) {
  auto net = sharded_net(mesh, precision);
  AdamW optimizer(sharded_parameters(net), {.lr = 2e-2});
  ShardedGradScaler scaler(mesh, options);
  return train(net, mesh, optimizer, scaler);
}

// Powers of two change exponents alone, so that float32 gives the same bits.
TEST(ScaledTraining, IsTheUnscaledOneToTheBitInFloat32_6_20) {
  for (const int world : {1, 2, 3}) {
    run_mesh(world, [](Mesh& mesh) {
      const auto plain = train_adamw(mesh, {}, {.enabled = false});
      const auto scaled = train_adamw(mesh, {}, {.growth_interval = 3});
      EXPECT_EQ(plain.losses, scaled.losses);
      EXPECT_EQ(scaled.skipped(), 0);
      EXPECT_EQ(scaled.scale, std::ldexp(65536.0, 6));  // it did scale
      EXPECT_LT(plain.losses.back(), plain.losses.front() / 4);
    });
  }
}

TEST(ScaledTraining, ConvergesInHalfAsWithoutScaling_6_20) {
  for (const int world : {1, 2, 3}) {
    run_mesh(world, [](Mesh& mesh) {
      const auto plain = train_adamw(mesh, kHalf, {.enabled = false});
      // Begins where float16 overflows: the first steps are left out.
      const auto scaled = train_adamw(mesh, kHalf, {.init_scale = std::ldexp(1.0, 20)});
      EXPECT_FALSE(scaled.stepped.front());
      EXPECT_LT(scaled.skipped(), 8);
      EXPECT_EQ(scaled.scale, std::ldexp(1.0, 20 - scaled.skipped()));
      std::size_t steps = 0;  // taken so far
      for (std::size_t i = 0; i < scaled.losses.size(); ++i) {
        EXPECT_NEAR(scaled.losses[i], plain.losses[steps], 0.02) << i;
        if (scaled.stepped[i]) ++steps;
      }
      EXPECT_LT(plain.losses.back(), plain.losses.front() / 4);
    });
  }
}

TEST(ScaledTraining, KeepsGradientsThatHalfLoses_6_20) {
  run_mesh(2, [](Mesh& mesh) {
    const double dim = std::ldexp(1.0, -26);  // below float16's smallest number
    const auto train_dimmed = [&](const MixedPrecision& precision,
                                  const GradScalerOptions& options) {
      auto net = sharded_net(mesh, precision);
      torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)),
                                  torch::optim::SGDOptions(0.5 / dim));
      ShardedGradScaler scaler(mesh, options);
      return train(net, mesh, optimizer, scaler, dim).losses;
    };
    const auto whole = train_dimmed({}, {.enabled = false});
    const auto lost = train_dimmed(kHalf, {.enabled = false});
    const auto kept = train_dimmed(kHalf, {.init_scale = std::ldexp(1.0, 34)});
    EXPECT_EQ(lost.front(), lost.back());
    EXPECT_LT(whole.back(), whole.front() / 2);
    EXPECT_NEAR(kept.back(), whole.back(), 0.05);
  });
}

}  // namespace
}  // namespace tessera
