// The devices of tensors: what a user puts in their place, modules on other devices, offload (spec
// 5.2, 6.5, 6.17). The meta device stands for a second one: it computes shapes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "base/testing.h"
#include "fsdp/testing/test_training.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "torch/device.h"
#include "torch/test_device/device_mesh.h"
#include "torch/test_device/test_device.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::error_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::run_mesh;

// Tensors that a user puts in the place of ours ---------------------------------------------------

TEST(Replaced, ParametersAreTakenOver_UO7) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool flat : {false, true}) {
      nn::Linear linear(3, 4);
      if (flat) {
        FullyShardedDataParallel<nn::Linear>(linear, mesh, {.use_orig_params = true});
      } else {
        fully_shard(linear, mesh);
      }
      const auto parameters = sharded_parameters(linear);
      // This rank's part of one, all of another.
      parameters[0].local.set_data(torch::full_like(parameters[0].local, 3));
      linear->bias.set_data(torch::tensor({0.f, 1.f, 2.f, 3.f}, mesh.device()));
      const auto y = call_module(linear, torch::ones({1, 3}));
      EXPECT_TRUE(testing::equal(y.detach(), torch::tensor({{9.f, 10.f, 11.f, 12.f}})));
      y.sum().backward();
      const auto state = full_state_dict(linear);
      EXPECT_TRUE(testing::equal(state["weight"], torch::full({4, 3}, 3.f)));
      EXPECT_TRUE(testing::equal(state["bias"], torch::tensor({0.f, 1.f, 2.f, 3.f})));
      EXPECT_TRUE(parameters[0].local.grad().defined());
      parameters[0].local.set_data(torch::full_like(parameters[0].local, 5));
      EXPECT_EQ(full_state_dict(linear)["weight"].min().item<float>(), 5);
    }
  });
}

TEST(Replaced, OtherShapesAndChangesBeforeBackwardAreRefused_UO7) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(3, 4);
    fully_shard(linear, mesh, {.reshard_after_forward = false});
    const auto forward = [&] { return call_module(linear, torch::ones({1, 3})); };
    const auto y = forward();
    const auto local = sharded_parameters(linear)[0].local;
    const auto before = local.detach();
    local.set_data(torch::ones_like(before));
    EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("were changed between"));
    abandon_step(linear);
    local.set_data(torch::ones({7}, mesh.device()));
    EXPECT_THAT(error_of([&] { forward(); }),
                HasSubstr("Cannot writeback when the parameter shape changes"));
  });
}

at::Tensor on_meta(const at::Tensor& like) {
  return at::empty_like(like.detach(), like.options().device(torch::kMeta).requires_grad(false));
}

// What module->to() would do on another device.
void move(const at::Tensor& tensor) {
  const auto moved = on_meta(tensor);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
}

TEST(Replaced, ParametersOnAnotherDeviceAreAnError_X25_X29_X33_CO6_L31) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool offload : {false, true}) {
      nn::Linear linear(3, 4);
      fully_shard(linear, mesh, {.offload_to_cpu = offload});
      move(sharded_parameters(linear)[0].local);
      const auto text = error_of([&] { call_module(linear, torch::ones({1, 3})); });
      EXPECT_THAT(text, HasSubstr("has parameters on meta"));
      EXPECT_THAT(text, HasSubstr(offload ? "not move the module from CPU when offloading"
                                          : "move the module to " + mesh.device().str() +
                                                " before training"));
    }
    nn::Linear linear(3, 4);
    FullyShardedDataParallel<nn::Linear> model(linear, mesh);
    move(linear->weight);
    EXPECT_THAT(error_of([&] {
                  model(torch::ones({1, 3}));
                }),
                HasSubstr("unexpectedly has parameters on meta"));
  });
}

// A second device ---------------------------------------------------------------------------------

struct BufferedImpl : nn::Module {
  nn::Linear linear{nullptr};
  torch::Tensor table;
  torch::Device weight_on = torch::kCPU, input_on = torch::kCPU;
  BufferedImpl() {
    linear = register_module("linear", nn::Linear(4, 3));
    table = register_buffer("table", torch::ones({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    weight_on = linear->weight.device();
    input_on = x.device();
    return linear->forward(x) * table;
  }
};
TESSERA_MODULE(Buffered);

// The meta device computes shapes, and nothing comes back from it: forwards only.
MeshOptions meta_mesh() {
  return {.device = torch::Device(torch::kMeta)};
}

TEST(SecondDevice, ParametersBuffersAndInputsGoThere_C10_L12_L33_L41) {
  for (const bool whole : {false, true}) {
    const Mesh mesh(meta_mesh());
    Buffered model;
    if (whole) {
      replicate(model, mesh);
    } else {
      fully_shard(model, mesh);
    }
    for (const auto& parameter : sharded_parameters(model))
      EXPECT_TRUE(parameter.local.is_meta()) << parameter.name();
    const auto y = model(torch::ones({2, 4}));
    EXPECT_TRUE(model->weight_on.is_meta());
    EXPECT_TRUE(model->input_on.is_meta());
    EXPECT_TRUE(model->table.is_meta());
    EXPECT_TRUE(y.is_meta());
    EXPECT_EQ(y.sizes(), (std::vector<std::int64_t>{2, 3}));
  }
}

TEST(SecondDevice, OffloadedShardsStayOnTheCpu_L19_CO2_CO3_CO7) {
  for (const bool original : {false, true}) {
    const Mesh mesh(meta_mesh());
    Buffered buffered;
    const auto bias = buffered->linear->bias.detach().clone();
    FullyShardedDataParallel<Buffered> model(
        buffered, mesh, {.cpu_offload = {.offload_params = true}, .use_orig_params = original});
    const auto parameters = model.parameters();
    const auto address = parameters[0].local.data_ptr();
    model(torch::ones({2, 4}));
    EXPECT_TRUE(model->weight_on.is_meta());
    const auto after = model.parameters();
    EXPECT_TRUE(after[0].local.is_cpu());
    EXPECT_EQ(after[0].local.data_ptr(), address);
    EXPECT_TRUE(testing::equal(full_state_dict(model.module())["linear.bias"], bias));
  }
}

TEST(SecondDevice, ParametersOnDevicesThatTheMeshHasNotAreRefused_L9_X6_X7_X8_C10) {
  const auto with = [](const std::vector<std::string>& parameters, const std::string& mesh) {
    std::vector<torch::Device> devices(parameters.begin(), parameters.end());
    return error_of([&] { require_movable(devices, torch::Device(mesh), 1); });
  };
  EXPECT_EQ(with({}, "cuda:0"), "no Error");
  EXPECT_EQ(with({"cpu", "cpu"}, "cuda:0"), "no Error");
  EXPECT_EQ(with({"cpu", "cuda:0", "cpu"}, "cuda:0"), "no Error");
  EXPECT_THAT(
      with({"cuda:0", "cuda:1"}, "cuda:0"),
      HasSubstr("FSDP only supports single device modules but got params on cuda:0, cuda:1"));
  EXPECT_THAT(with({"cpu", "cuda:0"}, "cpu"),
              HasSubstr("To support a module with both CPU and GPU params"));
  EXPECT_THAT(with({"cuda:0", "xpu:0"}, "cuda:0"),
              HasSubstr("different device types but got params on cuda and xpu"));
  EXPECT_THAT(with({"cuda:1"}, "cuda:0"),
              HasSubstr("Inconsistent compute device and `device_id` on rank 1: cuda:1 vs cuda:0"));
}

TEST(SecondDevice, WithoutAnIndexIsTheCurrentOne_L10_X9) {
  const testing_support::Warnings warnings;
  const auto resolved = [](const std::string& device) {
    return resolve_device(torch::Device(device), 3, [] { return 5; }).str();
  };
  EXPECT_EQ(resolved("cuda:2"), "cuda:2");
  EXPECT_EQ(resolved("cpu"), "cpu");
  EXPECT_TRUE(warnings.texts().empty());
  EXPECT_EQ(resolved("cuda"), "cuda:5");
  ASSERT_EQ(warnings.texts().size(), 1u);
  EXPECT_THAT(warnings.texts()[0],
              HasSubstr("cuda on rank 3, which does not have an explicit index"));
}

// Between a device and the CPU
// ---------------------------------------------------------------------

enum class OffloadKind { fully_shard, full_shard, no_shard };

void offload_net(testing::Net& net, const Mesh& mesh, OffloadKind kind, bool offload) {
  if (kind == OffloadKind::fully_shard) {
    const ShardOptions options{.offload_to_cpu = offload};
    for (auto& block : net->blocks) fully_shard(block, mesh, options);
    return fully_shard(net, mesh, options);
  }
  const bool is_whole = kind == OffloadKind::no_shard;
  FullyShardedDataParallel<testing::Net>(
      net, mesh,
      {.sharding_strategy = is_whole ? ShardingStrategy::no_shard : ShardingStrategy::full_shard,
       .cpu_offload = {.offload_params = offload},
       .use_orig_params = true});
}

// Two steps of two backwards each.
FullState trained_with(const Mesh& mesh, OffloadKind kind, bool offload) {
  auto net = make_net({});
  offload_net(net, mesh, kind, offload);
  const auto parameters = sharded_parameters(net);
  torch::optim::SGD optimizer(local_tensors(parameters), testing::sgd_options());
  for (int micro = 0; micro < 4; ++micro) {
    loss_of(net, batch(0, micro, 1).to(mesh.device())).backward();
    for (const auto& parameter : parameters) {
      EXPECT_EQ(parameter.local.is_cpu(), offload) << parameter.name();
      EXPECT_EQ(parameter.local.is_pinned(), offload) << parameter.name();
      if (parameter.local.numel() == 0) continue;  // FSDP1 gives those no gradient
      EXPECT_TRUE(parameter.local.grad().defined() &&
                  parameter.local.grad().device() == parameter.local.device())
          << parameter.name();
    }
    if (micro % 2 == 0) continue;  // accumulates
    clip_grad_norm(parameters, 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  return full_state_dict(net, {.offload_to_cpu = true});
}

void expect_offload_trains_alike(const Mesh& mesh) {
  for (const auto kind :
       {OffloadKind::fully_shard, OffloadKind::full_shard, OffloadKind::no_shard}) {
    const auto stays = trained_with(mesh, kind, false), leaves = trained_with(mesh, kind, true);
    for (const auto& entry : stays) {
      EXPECT_TRUE(testing::allclose(entry.value(), leaves[entry.key()], 1e-5, 1e-6))
          << entry.key() << " of " << static_cast<int>(kind);
    }
  }
}

TEST(DeviceOffload, TrainsAsWithoutIt_CO1_CO4_CO5_F6) {
  for (const int ranks : {1, 2}) {
    testing::run_device_mesh(ranks, expect_offload_trains_alike);
    EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
  }
}

TEST(DeviceOffload, TrainsAsWithoutItOnCuda) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  expect_offload_trains_alike(Mesh(MeshOptions{.device = torch::Device(torch::kCUDA, 0)}));
}

}  // namespace
}  // namespace tessera
