// Loss scaling on gradients that are set by hand (spec 6.20). Numbers beside PyTorch's are in
// tests/multirank, trainings in src/fsdp.
#include "tessera/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/checkpoint.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_mesh;

constexpr double kInf = std::numeric_limits<double>::infinity();

torch::Tensor make_local(std::int64_t size, at::ScalarType type = at::kFloat) {
  return torch::ones({size}, type).requires_grad_();
}

ShardedParameter parameter_of(const torch::Tensor& local) {
  ShardedParameter parameter;
  parameter.names = {"p"};
  parameter.shape = local.sizes().vec();
  parameter.local = local;
  return parameter;
}

void set_gradient(const torch::Tensor& local, double value) {
  local.mutable_grad() = torch::full_like(local, value).detach();
}

// Scales something, as every iteration does.
void start(ShardedGradScaler& scaler) {
  static_cast<void>(scaler.scale(torch::ones({})));
}

torch::optim::SGD make_sgd(const torch::Tensor& local) {
  return torch::optim::SGD({local}, torch::optim::SGDOptions(1.0));
}

TEST(GradScaler, ScalesInTheOutputsOwnDtype_6_20) {
  run_mesh(1, [](Mesh& mesh) {
    ShardedGradScaler scaler(mesh, {.init_scale = 8});
    for (const auto type : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
      for (const auto& output : {torch::full({}, 3, type), torch::full({2, 2}, 3, type)}) {
        const auto leaf = output.clone().requires_grad_();
        const auto scaled = scaler.scale(leaf);
        EXPECT_EQ(scaled.scalar_type(), type);
        EXPECT_TRUE(torch::equal(scaled, torch::full_like(leaf, 24)));
        scaled.sum().backward();
        EXPECT_TRUE(torch::equal(leaf.grad(), torch::full_like(leaf, 8)));
      }
    }
    const auto several = scaler.scale({torch::ones({2}), torch::full({}, 2, at::kHalf)});
    ASSERT_EQ(several.size(), 2u);
    EXPECT_TRUE(torch::equal(several[0], torch::full({2}, 8.0)));
    EXPECT_TRUE(torch::equal(several[1], torch::full({}, 16, at::kHalf)));
  });
}

TEST(GradScaler, DividesGradientsOfEveryKindInPlace_6_20) {
  for (const int world : {1, 2, 3}) {
    run_mesh(world, [](Mesh& mesh) {
      std::vector<torch::Tensor> locals;
      for (const auto type : {at::kHalf, at::kFloat, at::kBFloat16, at::kDouble, at::kHalf}) {
        locals.push_back(make_local(19, type));
        set_gradient(locals.back(), 40);
      }
      locals.push_back(make_local(0));  // an empty shard
      set_gradient(locals.back(), 0);
      locals.push_back(make_local(3));  // one that was not used
      const auto matrix = torch::ones({4, 6}).requires_grad_();
      matrix.mutable_grad() = torch::full({6, 4}, 40.0).t();  // not contiguous
      locals.push_back(matrix);
      locals.push_back(make_local(5));
      locals.back().mutable_grad() = at::_neg_view(torch::full({5}, -40.0));  // of a negative bit
      std::vector<torch::Tensor> gradients;
      for (const auto& local : locals) gradients.push_back(local.grad());

      torch::optim::SGD optimizer(locals, torch::optim::SGDOptions(1.0));
      ShardedGradScaler scaler(mesh, {.init_scale = 8});
      start(scaler);
      scaler.unscale(optimizer);
      for (std::size_t i = 0; i < locals.size(); ++i) {
        if (i == 6) {
          EXPECT_FALSE(locals[i].grad().defined());
          continue;
        }
        EXPECT_TRUE(locals[i].grad().is_same(gradients[i])) << i;
        EXPECT_EQ(locals[i].grad().scalar_type(), locals[i].scalar_type());
        EXPECT_TRUE(torch::equal(gradients[i], torch::full_like(gradients[i], 5))) << i;
      }
      EXPECT_TRUE(scaler.step(optimizer));  // and does not divide once more
      EXPECT_TRUE(torch::equal(matrix, torch::full_like(matrix, -4)));
    });
  }
}

// Two iterations: in the first, `bad` is in the gradient of rank `culprit` alone.
template <typename MakeOptimizer>
void expect_all_skip(int world, int culprit, double bad, at::ScalarType type,
                     const MakeOptimizer& make_optimizer) {
  run_mesh(world, [&](Mesh& mesh) {
    const auto local = make_local(37, type);
    auto optimizer = make_optimizer(local);
    ShardedGradScaler scaler(mesh, {.init_scale = 4});
    start(scaler);
    set_gradient(local, 4);
    if (mesh.rank() == culprit) local.grad()[36] = bad;
    EXPECT_FALSE(scaler.step(optimizer));
    EXPECT_TRUE(torch::equal(local, torch::ones_like(local)));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2);

    start(scaler);
    set_gradient(local, 4);
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_TRUE(torch::all(local < 1).item<bool>());
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2);
  });
}

TEST(GradScaler, OneRanksInfOrNanMakesAllSkip_6_20) {
  const auto make_adamw = [](const torch::Tensor& local) { return AdamW({parameter_of(local)}); };
  for (const int world : {1, 2, 3}) {
    for (int culprit = 0; culprit < world; ++culprit) {
      expect_all_skip(world, culprit, kInf, at::kFloat, make_adamw);
      expect_all_skip(world, culprit, -kInf, at::kHalf, make_sgd);
      expect_all_skip(world, culprit, std::nan(""), at::kBFloat16, make_sgd);
    }
  }
}

TEST(GradScaler, ARankWithoutGradientsTakesPart_6_20) {
  for (const bool finite : {true, false}) {
    run_mesh(3, [&](Mesh& mesh) {
      const auto local = make_local(mesh.rank() == 2 ? 0 : 3);
      if (mesh.rank() == 0) set_gradient(local, finite ? 1 : kInf);
      AdamW optimizer({parameter_of(local)});
      ShardedGradScaler scaler(mesh);
      start(scaler);
      EXPECT_EQ(scaler.step(optimizer), finite);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), finite ? 65536 : 32768);
    });
  }
}

TEST(GradScaler, RanksOfOtherReplicasSkipToo_6_20) {
  run_mesh(4, [](Mesh& mesh) {
    const auto hybrid = mesh.split(2);
    const auto local = make_local(3);
    set_gradient(local, mesh.rank() == 3 ? kInf : 1);
    auto optimizer = make_sgd(local);
    ShardedGradScaler scaler(hybrid);
    start(scaler);
    EXPECT_FALSE(scaler.step(optimizer));
  });
}

TEST(GradScaler, AStepIsSkippedAfterClippingMadeItsGradientsNan_6_20) {
  run_mesh(2, [](Mesh& mesh) {
    const auto local = make_local(3);
    set_gradient(local, mesh.rank() == 1 ? kInf : 8);
    auto parameter = parameter_of(local);
    parameter.sharded = true;
    parameter.mesh = mesh;
    AdamW optimizer({parameter});
    ShardedGradScaler scaler(mesh, {.init_scale = 8});
    start(scaler);
    scaler.unscale(optimizer);
    if (mesh.rank() == 0) {
      EXPECT_EQ(local.grad()[0].item<float>(), 1);
    }
    clip_grad_norm({parameter}, 1.0);
    EXPECT_FALSE(scaler.step(optimizer));
    EXPECT_TRUE(torch::equal(local, torch::ones({3})));
  });
}

TEST(GradScaler, ParametersWithoutAnOptimizer_6_20) {
  run_mesh(2, [](Mesh& mesh) {
    const auto local = make_local(3), other = make_local(2);
    ShardedGradScaler scaler(mesh, {.init_scale = 8});
    start(scaler);
    set_gradient(local, 8);
    set_gradient(other, mesh.rank() == 1 ? kInf : 8);
    EXPECT_TRUE(scaler.unscale({parameter_of(local)}));
    EXPECT_FALSE(scaler.unscale({parameter_of(other)}));
    EXPECT_TRUE(torch::equal(local.grad(), torch::ones({3})));
    EXPECT_THAT(error_of([&] { return scaler.unscale({parameter_of(local)}); }).what(),
                HasSubstr("unscale_() has already been called"));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
    EXPECT_TRUE(scaler.unscale({}));  // a rank may have none
    scaler.update();
  });
}

TEST(GradScaler, SparseGradients_6_20) {
  run_mesh(2, [](Mesh& mesh) {
    const auto sparse = [](std::vector<float> values, at::ScalarType type) {
      return torch::sparse_coo_tensor(torch::tensor({{1, 1, 3}}), torch::tensor(values).to(type),
                                      {5});
    };
    const auto local = make_local(5), half = make_local(5, at::kHalf);
    auto optimizer = make_sgd(local), half_optimizer = make_sgd(half);
    ShardedGradScaler scaler(mesh, {.init_scale = 8});
    start(scaler);
    local.mutable_grad() = sparse({8, 16, 24}, at::kFloat);
    scaler.unscale(optimizer);
    EXPECT_TRUE(torch::equal(local.grad().to_dense(), torch::tensor({0.F, 3.F, 0.F, 3.F, 0.F})));
    // Each is finite in float16 and their sum is not.
    half.mutable_grad() = sparse({40000, 40000, 8}, at::kHalf);
    EXPECT_FALSE(scaler.step(half_optimizer));
    EXPECT_TRUE(half.grad().is_sparse());
    EXPECT_EQ(half.grad().scalar_type(), at::kHalf);
  });
}

TEST(GradScaler, GrowsAndBacksOffByTheRule_6_20) {
  run_mesh(2, [](Mesh& mesh) {
    const auto local = make_local(2);
    auto optimizer = make_sgd(local);
    ShardedGradScaler scaler(
        mesh, {.init_scale = 64, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 2});
    std::vector<double> scales;
    const auto iterate = [&](bool finite) {
      start(scaler);
      set_gradient(local, !finite && mesh.rank() == 1 ? std::nan("") : 0);
      EXPECT_EQ(scaler.step(optimizer), finite);
      scaler.update();
      scales.push_back(scaler.get_scale());
    };
    for (const bool finite : {true, true, true, false, true, true, true}) iterate(finite);
    EXPECT_THAT(scales, ElementsAre(64, 256, 256, 64, 64, 256, 256));
    scaler.update(100);  // a new scale leaves the count as it is
    iterate(true);
    EXPECT_EQ(scales.back(), 400);
  });
}

TEST(GradScaler, DoesNotGrowToInfinity_6_20) {
  run_mesh(1, [](Mesh& mesh) {
    const double highest = std::ldexp(1.0, 127);
    ShardedGradScaler scaler(mesh, {.init_scale = highest / 2, .growth_interval = 1});
    for (int i = 0; i < 3; ++i) {
      start(scaler);
      EXPECT_TRUE(scaler.unscale({}));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), highest);
    }
  });
}

TEST(GradScaler, OptimizersStepEachByItsOwnGradients_6_20) {
  run_mesh(2, [](Mesh& mesh) {
    const auto good = make_local(2), bad = make_local(2);
    auto first = make_sgd(good), second = make_sgd(bad);
    AdamW third({parameter_of(make_local(1))});
    ShardedGradScaler scaler(mesh, {.init_scale = 8});
    start(scaler);
    set_gradient(good, 8);
    set_gradient(bad, mesh.rank() == 0 ? kInf : 8);
    EXPECT_FALSE(scaler.step(second));
    EXPECT_TRUE(scaler.step(first));
    EXPECT_TRUE(scaler.step(third));
    EXPECT_TRUE(torch::equal(good, torch::zeros({2})));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);  // once for all of them
  });
}

template <typename Call>
void expect_refused(Call&& call, const std::string& words) {
  const auto error = error_of(call);
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_THAT(error.message(), HasSubstr(words));
}

TEST(GradScaler, RefusesMisuseInPytorchsWords_6_20) {
  run_mesh(2, [](Mesh& mesh) {
    const auto local = make_local(2);
    auto optimizer = make_sgd(local);
    ShardedGradScaler scaler(mesh, {.init_scale = 8});
    set_gradient(local, 8);
    const std::string fix = "did not use scaler.scale(loss or outputs) earlier in the iteration";
    expect_refused([&] { scaler.unscale(optimizer); }, "Attempted unscale_ but _scale is None");
    expect_refused([&] { return scaler.unscale({}); }, fix);
    expect_refused([&] { scaler.step(optimizer); }, "Attempted step but _scale is None");
    expect_refused([&] { scaler.update(); }, "Attempted update but _scale is None");

    start(scaler);
    expect_refused([&] { scaler.update(); }, "No inf checks were recorded prior to update");
    scaler.unscale(optimizer);
    expect_refused([&] { scaler.unscale(optimizer); },
                   "unscale_() has already been called on this optimizer since the last update()");
    EXPECT_TRUE(torch::equal(local.grad(), torch::ones({2})));
    EXPECT_TRUE(scaler.step(optimizer));
    expect_refused([&] { scaler.unscale(optimizer); }, "unscale_() is being called after step()");
    expect_refused([&] { scaler.step(optimizer); },
                   "step() has already been called since the last update()");
    EXPECT_TRUE(torch::equal(local, torch::zeros({2})));
    for (const double bad : {0.0, -1.0, kInf, std::nan(""), 1e39, 1e-39}) {
      expect_refused([&] { scaler.update(bad); }, "expected a finite number above 0");
    }
    EXPECT_EQ(scaler.get_scale(), 8);
    scaler.update();
    EXPECT_TRUE(scaler.step(optimizer));  // a new iteration
  });
}

TEST(GradScaler, RefusesOptionsThatPytorchRefuses_6_20) {
  run_mesh(1, [](Mesh& mesh) {
    const auto refused = [&](const GradScalerOptions& options, const std::string& words) {
      expect_refused([&] { const ShardedGradScaler scaler(mesh, options); }, words);
    };
    refused({.growth_factor = 1.0}, "The growth factor must be > 1.0");
    refused({.growth_factor = std::nan("")}, "The growth factor must be > 1.0");
    refused({.backoff_factor = 1.0}, "The backoff factor must be < 1.0");
    refused({.init_scale = 0}, "expected a finite number above 0");
    EXPECT_NO_THROW(ShardedGradScaler(mesh, {.growth_factor = 1.0, .enabled = false}));
  });
}

TEST(GradScaler, DoesNothingWhenNotEnabled_6_20) {
  run_mesh(2, [](Mesh& mesh) {
    const auto local = make_local(2);
    auto optimizer = make_sgd(local);
    ShardedGradScaler scaler(mesh, {.enabled = false});
    EXPECT_FALSE(scaler.is_enabled());
    const auto loss = torch::ones({});
    EXPECT_TRUE(scaler.scale(loss).is_same(loss));
    set_gradient(local, kInf);
    scaler.unscale(optimizer);
    scaler.unscale(optimizer);
    EXPECT_TRUE(scaler.unscale({parameter_of(local)}));
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_TRUE(torch::equal(local, torch::full({2}, -kInf)));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 1);
    EXPECT_EQ(scaler.state_dict().size(), 0u);
    scaler.load_state_dict(ShardedGradScaler(mesh).state_dict());
    EXPECT_EQ(scaler.get_scale(), 1);
  });
}

// The scales after iterations of which the last finds an inf.
std::vector<double> scales_of(ShardedGradScaler& scaler, int iterations) {
  std::vector<double> scales;
  const auto local = make_local(1);
  for (int i = 0; i < iterations; ++i) {
    start(scaler);
    set_gradient(local, i + 1 == iterations ? kInf : 0);
    EXPECT_EQ(scaler.unscale({parameter_of(local)}), i + 1 < iterations);
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  return scales;
}

TEST(GradScaler, GoesOnFromACheckpoint_6_20) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/checkpoint";
  run_mesh(2, [&](Mesh& mesh) {
    ShardedGradScaler first(
        mesh,
        {.init_scale = 48, .growth_factor = 8, .backoff_factor = 0.125, .growth_interval = 3});
    start(first);
    EXPECT_TRUE(first.unscale({}));
    first.update();
    const auto state = first.state_dict();
    std::vector<std::string> names;
    for (const auto& pair : state.pairs()) names.push_back(pair.first.as_string());
    EXPECT_THAT(names, ElementsAre("scale", "growth_factor", "backoff_factor", "growth_interval",
                                   "_growth_tracker"));
    EXPECT_EQ(state.at("_growth_tracker").as_int(), 1);
    save(Value::dict({{"scaler", state}}), path, mesh.checkpoint_group());

    ShardedGradScaler second(mesh);
    auto tree = Value::dict({{"scaler", second.state_dict()}});
    load(tree, path, mesh.checkpoint_group());
    second.load_state_dict(tree.at("scaler"));
    EXPECT_EQ(second.state_dict(), state);
    const auto scales = scales_of(second, 3);
    EXPECT_THAT(scales, ElementsAre(48, 384, 48));  // the count went on from 1
    EXPECT_EQ(scales, scales_of(first, 3));
  });
}

TEST(GradScaler, RefusesStatesThatAreNone_6_20) {
  run_mesh(1, [](Mesh& mesh) {
    ShardedGradScaler scaler(mesh);
    const auto before = scaler.state_dict();
    const auto code_with = [&](const char* key, Value value) {
      auto state = Value::dict(before.pairs());
      state.set_item("growth_factor", 16.0);
      state.set_item(key, std::move(value));
      return code_of([&] { scaler.load_state_dict(state); });
    };
    expect_refused([&] { scaler.load_state_dict(Value::dict()); },
                   "saved from a disabled instance of GradScaler");
    EXPECT_EQ(code_of([&] {
                scaler.load_state_dict(Value::dict({{"scale", 2.0}}));
              }),
              ErrorCode::not_found);
    EXPECT_EQ(code_with("scale", "large"), ErrorCode::mismatch);
    EXPECT_EQ(code_with("scale", std::nan("")), ErrorCode::invalid_argument);
    EXPECT_EQ(code_with("_growth_tracker", std::int64_t{1} << 31), ErrorCode::limit);
    EXPECT_EQ(scaler.state_dict(), before);
  });
}

}  // namespace
}  // namespace tessera
