// Buffers that are not persistent, beside those of a Python module.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "conformance/errors.h"
#include "fsdp/state/model_state.h"
#include "fsdp/testing/test_model.h"
#include "fsdp/unit/unit_buffers.h"
#include "tessera/checkpoint.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::Contains;
using testing::keys;
using ::testing::Not;
using testing::run_mesh;

// As tests/golden/make/buffers.py has them.
struct RotaryImpl : nn::Cloneable<RotaryImpl> {
  torch::Tensor angles, offset;
  RotaryImpl() { RotaryImpl::reset(); }
  void reset() override {
    angles = tessera::register_buffer(*this, "angles", torch::arange(4, at::kFloat), false);
    offset = tessera::register_buffer(*this, "offset", torch::full({1}, 3.0F));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + offset + angles.sum(); }
};
TESSERA_MODULE(Rotary);

struct BufferedNetImpl : nn::Module {
  torch::Tensor mask, scale;
  nn::Linear linear{nullptr};
  Rotary rotary{nullptr};
  nn::Sequential layers;
  BufferedNetImpl() {
    mask = register_buffer("mask", torch::ones({2, 2}));
    set_persistent(*this, "mask", false);
    scale = register_buffer("scale", torch::zeros({2}));
    linear = register_module("linear", nn::Linear(2, 2));
    rotary = register_module("rotary", Rotary());
    layers = register_module("layers", nn::Sequential(Rotary(), nn::BatchNorm1d(2)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return layers->forward(rotary(linear(x) * scale).mm(mask));
  }
};
TESSERA_MODULE(BufferedNet);

const std::string& python_file() {
  static const std::string path = std::string(TESSERA_TEST_DATA) + "/golden/buffers.pt";
  return path;
}

TEST(PersistentBuffers, NamesAreThoseOfPython) {
  const auto expected = keys(Checkpoint::open(python_file()).load());
  ASSERT_EQ(expected.size(), 10u);
  for (const bool flat : {false, true}) {
    run_mesh(2, [&](Mesh& mesh) {
      BufferedNet plain, net;
      EXPECT_EQ(keys(model_state(plain)), expected);
      EXPECT_EQ(full_state_dict(plain).keys(), expected);
      std::optional<FullyShardedDataParallel<BufferedNet>> wrapped;
      if (flat) {
        wrapped.emplace(net, mesh, FullyShardedOptions{.use_orig_params = true});
      } else {
        fully_shard(net, mesh);
      }
      EXPECT_EQ(keys(model_state(net)), expected);
      EXPECT_EQ(full_state_dict(net).keys(), expected);
      for (const auto type : {StateDictType::full, StateDictType::sharded}) {
        const StateDictTypeScope scope(net, {.type = type});
        const auto state = state_dict(net);
        EXPECT_EQ(keys(state), expected);
        load_state_dict(net, state);
      }
      if (!flat) return;
      const StateDictTypeScope scope(net, {.type = StateDictType::local});
      EXPECT_THAT(keys(state_dict(net)), Not(Contains("mask")));
    });
  }
}

TEST(PersistentBuffers, PythonsFileFillsTheOthers) {
  BufferedNet net;
  auto state = model_state(net);
  load(state, python_file());
  EXPECT_TRUE(testing::equal(net->scale, torch::tensor({0.5F, 2.0F})));
  EXPECT_TRUE(testing::equal(net->mask, torch::ones({2, 2})));
  auto whole = full_state_dict(net);
  load_full_state_dict(net, whole);
  whole.insert("mask", torch::zeros({2, 2}));
  EXPECT_EQ(tessera::error_of([&] { load_full_state_dict(net, whole); }).key(), "mask");
}

TEST(PersistentBuffers, AreBuffersInAllElse) {
  run_mesh(2, [](Mesh& mesh) {
    BufferedNet net;
    net->to(at::kDouble);
    net->to(at::kFloat);
    EXPECT_FALSE(is_persistent(*net, "mask"));  // the tensor with other data
    net->mask.fill_(mesh.rank() + 1);
    sync_buffers(net, mesh);
    EXPECT_TRUE(testing::equal(net->mask, torch::ones({2, 2})));
    const MixedPrecision precision{.param_dtype = at::kDouble, .buffer_dtype = at::kDouble};
    fully_shard(net, mesh, {.mixed_precision = precision});
    const torch::NoGradGuard no_grad;
    const auto output = net(torch::ones({3, 2}));
    EXPECT_EQ(net->mask.scalar_type(), at::kDouble);
    EXPECT_FALSE(is_persistent(*net, "mask"));
    EXPECT_THAT(keys(model_state_to_save(net)), Not(Contains("mask")));
  });
}

TEST(PersistentBuffers, SettingsChangeAndAreAskedFor) {
  Rotary rotary;
  EXPECT_FALSE(is_persistent(*rotary, "angles"));
  EXPECT_TRUE(is_persistent(*rotary, "offset"));
  set_persistent(*rotary, "angles", true);
  EXPECT_EQ(keys(model_state(rotary)), (std::vector<std::string>{"angles", "offset"}));
  set_persistent(*rotary, "offset", false);
  EXPECT_EQ(keys(model_state(rotary)), std::vector<std::string>{"angles"});
  EXPECT_EQ(tessera::error_of([&] { set_persistent(*rotary, "none", true); }).code(),
            ErrorCode::not_found);
  EXPECT_EQ(tessera::error_of([&] { static_cast<void>(is_persistent(*rotary, "none")); }).key(),
            "none");
  tessera::register_buffer(*rotary, "undefined", {}, false);
  EXPECT_EQ(keys(model_state(rotary)), std::vector<std::string>{"angles"});
}

TEST(PersistentBuffers, AClonesResetSaysItAgain) {
  Rotary rotary;
  const auto copy = rotary->clone();
  EXPECT_EQ(keys(model_state(*copy)), std::vector<std::string>{"offset"});
  set_persistent(*rotary, "offset", false);
  EXPECT_EQ(keys(model_state(*rotary->clone())), std::vector<std::string>{"offset"});
}

// Neither memory nor what a tensor was outlives it.
TEST(PersistentBuffers, EndWithTheirTensors) {
  const auto before = detail::not_persistent_buffers();
  for (int i = 0; i < 2000; ++i) {
    { const Rotary gone; }
    nn::Module other;
    other.register_buffer("angles", torch::arange(4, at::kFloat));
    ASSERT_TRUE(is_persistent(other, "angles"));
  }
  EXPECT_LT(detail::not_persistent_buffers(), before + 100);
}

}  // namespace
}  // namespace tessera
