// Models that are asked within c10::InferenceMode, before, between and after steps that train them.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "fsdp/testing/any_device.h"
#include "fsdp/testing/test_values.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::with_values;

struct AskedBlockImpl : nn::Module {
  nn::Linear linear{nullptr};
  AskedBlockImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x).tanh(); }
};
TESSERA_MODULE(AskedBlock);

struct AskedImpl : nn::Module {
  AskedBlock first, second;
  nn::Linear out{nullptr};
  AskedImpl() {
    register_module("first", first.ptr());
    register_module("second", second.ptr());
    out = register_module("out", nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(second(first(x))); }
};
TESSERA_MODULE(Asked);

enum class AskedKind { rows, flat, original, no_shard, replicate };

void wrap_asked(Asked& net, const Mesh& mesh, AskedKind kind) {
  if (kind == AskedKind::rows || kind == AskedKind::replicate) {
    const auto wrap = [&](auto& module) {
      if (kind == AskedKind::rows) fully_shard(module, mesh);
      if (kind == AskedKind::replicate) replicate(module, mesh);
    };
    wrap(net->first);
    wrap(net->second);
    return wrap(net);
  }
  const FullyShardedDataParallel<Asked> wrapped(
      net, mesh,
      {.sharding_strategy =
           kind == AskedKind::no_shard ? ShardingStrategy::no_shard : ShardingStrategy::full_shard,
       .auto_wrap_policy = module_wrap_policy<AskedBlockImpl>(),
       .use_orig_params = kind != AskedKind::flat});
}

class InferenceMode : public ::testing::TestWithParam<AskedKind> {};

TEST_P(InferenceMode, GivesTheNumbersOfOneProcess) {
  run_mesh(2, [&](Mesh& mesh) {
    auto alone = with_values(Asked(), 5), net = with_values(Asked(), 5);
    wrap_asked(net, mesh, GetParam());
    torch::optim::SGD one(alone->parameters(), 0.1);
    torch::optim::SGD two(local_tensors(sharded_parameters(net)), 0.1);
    const auto x = torch::linspace(-1, 1, 12).view({3, 4});
    for (int step = 0; step < 3; ++step) {
      {
        const c10::InferenceMode inference;
        EXPECT_TRUE(testing::allclose(net(x * step), alone(x * step), 1e-5, 1e-6)) << step;
      }
      for (auto* model : {&alone, &net}) (*model)(x + step).square().mean().backward();
      for (auto* optimizer : {&one, &two}) {
        optimizer->step();
        optimizer->zero_grad();
      }
    }
    const auto whole = full_state_dict(net);
    for (const auto& named : alone->named_parameters())
      EXPECT_TRUE(testing::allclose(whole[named.key()], named.value(), 1e-5, 1e-6)) << named.key();
  });
}

std::string asked_kind_name(const ::testing::TestParamInfo<AskedKind>& given) {
  constexpr const char* kNames[] = {"Rows", "Flat", "Original", "NoShard", "Replicate"};
  return kNames[static_cast<int>(given.param)];
}

INSTANTIATE_TEST_SUITE_P(Kinds, InferenceMode,
                         ::testing::Values(AskedKind::rows, AskedKind::flat, AskedKind::original,
                                           AskedKind::no_shard, AskedKind::replicate),
                         asked_kind_name);

}  // namespace
}  // namespace tessera
