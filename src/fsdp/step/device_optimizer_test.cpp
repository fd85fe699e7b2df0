// AdamW on a device (torch/test_device): it launches few kernels and waits for none, and computes
// what it computes on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/optim.h"
#include "tessera/optimizer_ref.h"
#include "torch/tensor.h"
#include "torch/test_device/test_device.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;
using testing::take_counts;
using testing::test_device;

// Of a group and dtype.
constexpr int kOptimizerLaunches = 4;

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

}  // namespace
}  // namespace tessera
