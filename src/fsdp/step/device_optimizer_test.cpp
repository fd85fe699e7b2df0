// What comes after backward on a device (torch/test_device): AdamW, clipping and scaling launch few
// kernels and wait for none, and compute what they compute on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/grad_scaler.h"
#include "tessera/norms.h"
#include "tessera/optim.h"
#include "tessera/optimizer_ref.h"
#include "torch/tensor.h"
#include "torch/test_device/device_mesh.h"
#include "torch/test_device/test_device.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;
using testing::take_counts;
using testing::test_device;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Launches for one group and dtype.
constexpr int kOptimizerLaunches = 4;
// Launches for gradients of three dtypes and whole ones beside them: five to find the norm of a
// dtype and two to change its gradients, the exchange, and what joins them.
constexpr int kClipLaunches = 28;

ShardedParameter held(const at::Tensor& local, const std::optional<Mesh>& mesh = {}) {
  ShardedParameter parameter;
  parameter.names = {"p"};
  parameter.shape = local.sizes().vec();
  parameter.local = local.requires_grad_();
  parameter.sharded = mesh.has_value();
  parameter.mesh = mesh;
  return parameter;
}

at::Tensor values_of(int seed, at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(sizes, generator, torch::kDouble).to(type);
}

// At the same strides, also where there are gaps.
at::Tensor placed(const at::Tensor& values, at::Device device) {
  auto copy = at::empty_strided(values.sizes(), values.strides(), values.options().device(device));
  return copy.copy_(values);
}

// The same parameters on the CPU and on the device, and an AdamW for each.
class Twins {
 public:
  using Groups = std::vector<std::vector<at::Tensor>>;  // of values

  explicit Twins(const Groups& groups) {
    std::vector<ParameterGroup> here, there;
    double lr = 0.1;
    for (const auto& group : groups) {
      lr /= 2;
      here.push_back({{}, {.lr = lr}});
      there.push_back({{}, {.lr = lr}});
      for (const auto& values : group) {
        here.back().parameters.push_back(held(placed(values, at::kCPU)));
        there.back().parameters.push_back(held(placed(values, test_device(0))));
      }
    }
    host = std::make_unique<AdamW>(here);
    device = std::make_unique<AdamW>(there);
  }

  // undefined: none.
  void set_gradient(std::size_t group, std::size_t index, const at::Tensor& gradient) const {
    const auto& here = host->parameters(group)[index].local;
    const auto& there = device->parameters(group)[index].local;
    here.mutable_grad() = gradient;
    there.mutable_grad() = gradient.defined() ? gradient.to(test_device(0)) : gradient;
  }

  // Returns what the device's step cost.
  [[nodiscard]] testing::DeviceCounts step() const {
    host->step();
    static_cast<void>(take_counts(0));
    device->step();
    return take_counts(0);
  }

  void expect_equal() const {
    for (std::size_t g = 0; g < host->group_count(); ++g) {
      for (std::size_t i = 0; i < host->parameters(g).size(); ++i) {
        const auto& here = host->state(g, i);
        const auto& there = device->state(g, i);
        EXPECT_TRUE(
            torch::equal(host->parameters(g)[i].local, device->parameters(g)[i].local.cpu()))
            << g << " " << i;
        ASSERT_EQ(here.defined(), there.defined());
        if (!here.defined()) continue;
        EXPECT_TRUE(torch::equal(here.exp_avg, there.exp_avg.cpu())) << g << " " << i;
        EXPECT_TRUE(torch::equal(here.exp_avg_sq, there.exp_avg_sq.cpu())) << g << " " << i;
        EXPECT_TRUE(torch::equal(here.step, there.step)) << g << " " << i;
      }
    }
  }

  std::unique_ptr<AdamW> host, device;
};

void expect_no_wait(const testing::DeviceCounts& counts) {
  EXPECT_THAT(counts.waits, IsEmpty());
  EXPECT_THAT(counts.pageable, IsEmpty());
}

// AdamW -------------------------------------------------------------------------------------------

// A group for each dtype of parameters and gradients.
TEST(DeviceAdamW, TakesFewLaunchesForEachGroupAndDtypeAndNoWait) {
  const std::vector<std::pair<at::ScalarType, at::ScalarType>> types{
      {at::kFloat, at::kFloat},
      {at::kDouble, at::kDouble},
      {at::kBFloat16, at::kBFloat16},
      {at::kFloat, at::kBFloat16},
      {at::kFloat, at::kDouble},
      {at::kBFloat16, at::kFloat},
      {at::kComplexFloat, at::kComplexFloat}};
  constexpr int kParameters = 20;
  Twins::Groups groups;
  for (const auto& [type, of_gradients] : types) {
    auto& group = groups.emplace_back();
    for (int i = 0; i < kParameters; ++i) group.push_back(values_of(i, {3, i + 1}, type));
  }
  const Twins twins(groups);
  for (int step = 0; step < 3; ++step) {
    for (std::size_t g = 0; g < types.size(); ++g) {
      for (int i = 0; i < kParameters; ++i)
        twins.set_gradient(g, i, values_of(100 * step + i, {3, i + 1}, types[g].second));
    }
    const auto counts = twins.step();
    expect_no_wait(counts);
    if (step == 0) continue;  // made the states
    EXPECT_LE(counts.all_launches(), kOptimizerLaunches * static_cast<int>(types.size()));
  }
  twins.expect_equal();
}

// One group may hold them all: a kernel takes one dtype.
TEST(DeviceAdamW, TakesDtypesApart) {
  const std::vector<at::ScalarType> types{at::kFloat, at::kBFloat16, at::kDouble};
  Twins::Groups groups(1);
  for (int i = 0; i < 9; ++i) groups[0].push_back(values_of(i, {4, 2}, types[i % 3]));
  const Twins twins(groups);
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 9; ++i)
      twins.set_gradient(0, i, values_of(10 * step + i, {4, 2}, types[i % 3]));
    const auto counts = twins.step();
    expect_no_wait(counts);
    if (step == 0) continue;
    EXPECT_LE(counts.all_launches(), 3 * kOptimizerLaunches);
  }
  twins.expect_equal();
}

// Experts that no token went to have no gradient, and count no step.
TEST(DeviceAdamW, TakesNoMoreWhereEachParameterIsOfAnotherAge) {
  constexpr int kParameters = 12;
  Twins::Groups groups(1);
  for (int i = 0; i < kParameters; ++i) groups[0].push_back(values_of(i, {5}));
  const Twins twins(groups);
  for (int step = 0; step < kParameters + 3; ++step) {
    for (int i = 0; i < kParameters; ++i)
      twins.set_gradient(0, i, i > step ? at::Tensor() : values_of(20 * step + i, {5}));
    const auto counts = twins.step();
    expect_no_wait(counts);
    if (step < kParameters) continue;
    EXPECT_LE(counts.all_launches(), kOptimizerLaunches);
  }
  twins.expect_equal();
  EXPECT_EQ(twins.device->state(0, 0).step.item<float>(), kParameters + 3);
  EXPECT_EQ(twins.device->state(0, kParameters - 1).step.item<float>(), 4);
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

// What does not lie flat is updated through copies.
TEST(DeviceAdamW, DoesNotWaitForStridesEither) {
  const Twins twins({{values_of(1, {4, 3}).t(), values_of(2, {2, 6}).slice(1, 0, 6, 2)}});
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < 2; ++i)
      twins.set_gradient(0, i, values_of(10 * step + i, twins.host->parameters()[i].local.sizes()));
    expect_no_wait(twins.step());
  }
  twins.expect_equal();
}

// A checkpoint says the same whatever the state is on, and PyTorch's fused optimizer gives numbers
// of steps on the device.
TEST(DeviceAdamW, ItsStateIsThatOfTheCpu) {
  const Twins twins({{values_of(1, {4}), values_of(2, {3})}});
  const auto train = [](const Twins& trained) {
    for (int step = 0; step < 2; ++step) {
      for (int i = 0; i < 2; ++i) trained.set_gradient(0, i, values_of(10 * step + i, {4 - i}));
      static_cast<void>(trained.step());
    }
  };
  train(twins);
  const auto saved = optimizer_state_dict(*twins.device);
  const auto expected = optimizer_state_dict(*twins.host);
  for (const auto& [key, state] : expected.at("state").pairs()) {
    for (const auto* name : {"step", "exp_avg", "exp_avg_sq"}) {
      const auto here = tensor_of(state.at(name).as_tensor());
      const auto there = tensor_of(saved.at("state").find_key(key)->at(name).as_tensor());
      EXPECT_TRUE(there.is_cpu());
      EXPECT_EQ(there.scalar_type(), here.scalar_type());
      EXPECT_TRUE(torch::equal(there, here)) << name;
    }
  }
  const Twins by_dict({{values_of(1, {4}), values_of(2, {3})}}),
      by_state({{values_of(1, {4}), values_of(2, {3})}});
  for (const auto* loaded : {&by_dict, &by_state}) {
    for (int i = 0; i < 2; ++i) {
      const torch::NoGradGuard no_grad;
      for (auto* optimizer : {loaded->host.get(), loaded->device.get()})
        optimizer->parameters()[i].local.copy_(twins.host->parameters()[i].local);
      loaded->host->set_state(0, i, twins.host->state(0, i));
      auto state = twins.device->state(0, i);
      state.step = state.step.to(test_device(0));
      if (loaded == &by_state) loaded->device->set_state(0, i, state);
    }
    if (loaded == &by_dict) load_optimizer_state_dict(*loaded->device, saved);
    loaded->expect_equal();
    train(*loaded);
    loaded->expect_equal();
  }
}

// Clipping ----------------------------------------------------------------------------------------

std::vector<ShardedParameter> clippable(const Mesh& mesh, at::Device device) {
  std::vector<ShardedParameter> parameters;
  int seed = 0;
  for (const auto type : {at::kFloat, at::kBFloat16, at::kFloat, at::kDouble, at::kBFloat16}) {
    // The last rank has nothing of the last float, and the last parameter is whole on every rank.
    const bool is_whole = ++seed == 5;
    const bool has_none = seed == 3 && mesh.rank() + 1 == mesh.size();
    const auto values = values_of(is_whole ? seed : 10 * mesh.rank() + seed, {7}, type);
    auto local = at::zeros({has_none ? 0 : 7}, at::TensorOptions(type).device(device));
    parameters.push_back(held(local, is_whole ? std::optional<Mesh>() : mesh));
    local.mutable_grad() = has_none ? at::zeros_like(local) : values.to(device);
  }
  return parameters;
}

struct Clipped {
  double norm;
  std::vector<at::Tensor> gradients;  // on the CPU
};
Clipped taken(double norm, const std::vector<ShardedParameter>& parameters) {
  Clipped clipped{norm, {}};
  for (const auto& parameter : parameters)
    clipped.gradients.push_back(parameter.local.grad().cpu());
  return clipped;
}

void expect_near(const Clipped& found, const Clipped& expected, const std::string& where) {
  if (std::isnan(expected.norm)) {
    EXPECT_TRUE(std::isnan(found.norm)) << where;
  } else {
    EXPECT_NEAR(found.norm, expected.norm, 1e-6 * expected.norm) << where;
  }
  for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
    // The factor has the gradients' dtype.
    const double rough = expected.gradients[i].scalar_type() == at::kBFloat16 ? 1e-2 : 1e-6;
    EXPECT_TRUE(
        at::allclose(found.gradients[i], expected.gradients[i], rough, 0, /*equal_nan=*/true))
        << where << ", gradient " << i;
  }
}

class DeviceClip : public ::testing::TestWithParam<int> {};

TEST_P(DeviceClip, NeitherNormNorFactorIsWaitedFor) {
  const int ranks = GetParam();
  for (const double p : {2.0, 1.0, 3.0, kInfinity}) {
    for (const double max_norm : {0.5, 1e6, std::nan("")}) {
      const auto where = std::to_string(p) + ", at most " + std::to_string(max_norm);
      std::vector<Clipped> expected(ranks);
      testing::run_mesh(ranks, [&](Mesh& mesh) {
        const auto parameters = clippable(mesh, mesh.device());
        expected[mesh.rank()] = taken(clip_grad_norm(parameters, max_norm, p), parameters);
      });
      testing::run_device_mesh(ranks, [&](Mesh& mesh) {
        const int device = mesh.device().index();
        auto parameters = clippable(mesh, mesh.device());
        static_cast<void>(take_counts(device));
        const auto norm = clip_grad_norm_(parameters, max_norm, p);
        const auto counts = take_counts(device);
        expect_no_wait(counts);
        EXPECT_EQ(norm.device(), mesh.device());
        EXPECT_EQ(norm.dim(), 0);
        EXPECT_LE(counts.all_launches(), kClipLaunches) << where;
        expect_near(taken(norm.item<double>(), parameters), expected[mesh.rank()], where);

        parameters = clippable(mesh, mesh.device());
        static_cast<void>(take_counts(device));
        const double number = clip_grad_norm(parameters, max_norm, p);
        EXPECT_EQ(take_counts(device).waits.size(), 1U);
        expect_near(taken(number, parameters), expected[mesh.rank()], where);
      });
    }
  }
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

// Offload has the gradients on the CPU of a mesh on the device. A rank without any takes part.
TEST_P(DeviceClip, GradientsMayBeOnTheCpu) {
  const int ranks = GetParam();
  for (const double p : {2.0, kInfinity}) {
    std::vector<Clipped> expected(ranks);
    const auto gradients_of = [&](const Mesh& mesh) {
      auto parameters = clippable(mesh, at::kCPU);
      if (mesh.rank() > 0) {
        for (const auto& parameter : parameters) parameter.local.mutable_grad() = at::Tensor();
      }
      parameters.pop_back();
      return parameters;
    };
    const auto norm_and_first = [&](const Mesh& mesh) {
      auto parameters = gradients_of(mesh);
      const double norm = clip_grad_norm(parameters, 0.5, p);
      if (mesh.rank() > 0) parameters.clear();
      return taken(norm, parameters);
    };
    testing::run_mesh(ranks, [&](Mesh& mesh) { expected[mesh.rank()] = norm_and_first(mesh); });
    testing::run_device_mesh(ranks, [&](Mesh& mesh) {
      expect_near(norm_and_first(mesh), expected[mesh.rank()], std::to_string(p));
      EXPECT_NEAR(get_total_norm(gradients_of(mesh), NormOf::gradients, p),
                  expected[mesh.rank()].norm, 1e-6 * expected[mesh.rank()].norm);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeviceClip, ::testing::Values(1, 2, 3));

// Together ----------------------------------------------------------------------------------------

TEST(DeviceOptimizer, WaitsForNothingAfterABackwardOfShards) {
  testing::run_device_mesh(2, [](Mesh& mesh) {
    const int device = mesh.device().index();
    auto net = testing::make_net({});
    testing::shard(net, mesh);
    const auto parameters = sharded_parameters(net);
    AdamW optimizer(parameters, {.lr = 0.01});
    for (int step = 0; step < 3; ++step) {
      testing::loss_of(net, testing::batch_of(step, 0, mesh).to(mesh.device())).backward();
      static_cast<void>(take_counts(device));
      static_cast<void>(clip_grad_norm_(parameters, 1.0));
      expect_no_wait(take_counts(device));
      optimizer.step();
      const auto counts = take_counts(device);
      expect_no_wait(counts);
      optimizer.zero_grad();
      if (step == 0) continue;
      EXPECT_LE(counts.all_launches(), kOptimizerLaunches);
    }
  });
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

// It says whether it took the step.
TEST(DeviceScaler, WaitsOnceAStep) {
  testing::run_device_mesh(2, [](Mesh& mesh) {
    const int device = mesh.device().index();
    const std::vector<ShardedParameter> parameters{
        held(at::ones({4}, at::TensorOptions(mesh.device())), mesh),
        held(at::ones({3}, at::TensorOptions(mesh.device()).dtype(at::kHalf)), mesh)};
    AdamW optimizer(parameters);
    ShardedGradScaler scaler(mesh, {.init_scale = 4});
    for (int step = 0; step < 4; ++step) {
      // The one of rank 1 is infinite.
      const float factor = step == 2 && mesh.rank() == 1 ? 1e30F : 2.0F;
      const auto loss =
          (parameters[0].local * factor).sum() * 1e10 + parameters[1].local.to(at::kFloat).sum();
      static_cast<void>(take_counts(device));
      scaler.scale(loss).backward();
      scaler.unscale(optimizer);
      static_cast<void>(clip_grad_norm_(parameters, 1.0));
      EXPECT_EQ(scaler.step(optimizer), step != 2);
      scaler.update();
      const auto counts = take_counts(device);
      EXPECT_EQ(counts.waits.size(), 1U) << ::testing::PrintToString(counts.waits);
      EXPECT_THAT(counts.pageable, IsEmpty());
      optimizer.zero_grad();
    }
    EXPECT_EQ(optimizer.state(0, 0).step.item<float>(), 3);
    EXPECT_EQ(scaler.get_scale(), 2);
  });
}

// The device has no backend of c10d: what ranks exchange goes through the host, and may share it.
TEST(DeviceMesh, RanksMayShareADeviceWhoseCollectivesGoOverTheHost) {
  testing::run_mesh(
      2,
      [](Mesh& mesh) {
        auto values = at::full({3}, 1.0 + mesh.rank(), at::TensorOptions(mesh.device()));
        mesh.all_reduce_sum(values);
        EXPECT_EQ(values.sum().item<float>(), 9);
      },
      std::chrono::seconds(30), true, [](int) { return test_device(0); });
}

}  // namespace
}  // namespace tessera
