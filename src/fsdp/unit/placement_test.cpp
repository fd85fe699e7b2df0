// Places that keep parameters: other dimensions than 0, parts of the ranks after forward, the CPU
// (spec F3, F4, F6), and units that are called by another method (F42).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "fsdp/state/model_state.h"
#include "fsdp/testing/counting_transport.h"
#include "fsdp/testing/test_training.h"
#include "tessera/error.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::Counts;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kSteps;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::reference;
using testing::run_mesh;

// Trains with `options` and compares with training whole.
void expect_reference(const Mesh& mesh, const ShardOptions& options) {
  const auto expected = reference(mesh.size(), 1, false);
  auto net = make_net({});
  for (auto& block : net->blocks) fully_shard(block, mesh, options);
  fully_shard(net, mesh, options);
  const auto parameters = sharded_parameters(net);
  torch::optim::SGD optimizer(local_tensors(parameters), testing::sgd_options());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    auto loss = loss_of(net, batch_of(step, 0, mesh));
    loss.backward();
    ASSERT_NEAR(mesh.all_reduce_sum(loss.item<double>()) / mesh.size(), expected.losses[step],
                2e-6 * expected.losses[step]);
    ASSERT_NEAR(clip_grad_norm(parameters, 1.0), expected.norms[step], 2e-6);
    optimizer.step();
  }
  const auto state = full_state_dict(net);
  for (const auto& parameter : parameters) {
    const auto& whole = expected.parameters.at(parameter.name());
    const auto rows = parameter.local.size(parameter.dim);
    EXPECT_TRUE(testing::allclose(parameter.local.detach(),
                                  whole.narrow(parameter.dim, parameter.offset, rows), 1e-5, 1e-6))
        << parameter.name();
    EXPECT_TRUE(testing::allclose(state[parameter.name()], whole, 1e-5, 1e-6)) << parameter.name();
  }
}

// The last dimension that the ranks divide.
std::optional<int> last_even(const torch::Tensor& parameter, int world) {
  for (int dim = static_cast<int>(parameter.dim()) - 1; dim > 0; --dim) {
    if (parameter.size(dim) % world == 0) return dim - static_cast<int>(parameter.dim());
  }
  return std::nullopt;
}

TEST(Placement, OtherDimensionsTrainAlike_F4) {
  for (const int world : {1, 7}) {  // the net's sizes are 7, 11 and 13
    run_mesh(world, [&](Mesh& mesh) {
      expect_reference(mesh, {.shard_placement = [&](const torch::Tensor& parameter) {
                         return last_even(parameter, world);
                       }});
    });
  }
}

TEST(Placement, OfOneParameterIsSeenEverywhere_F4) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(4, 3);
    {
      const torch::NoGradGuard no_grad;
      linear->weight.copy_(torch::arange(12).view({3, 4}));
    }
    fully_shard(linear, mesh, {.shard_placement = [](const torch::Tensor& parameter) {
                  return parameter.dim() == 2 ? std::optional(1) : std::nullopt;
                }});
    const auto weight = sharded_parameters(linear)[0];
    EXPECT_EQ(weight.dim, 1);
    EXPECT_EQ(weight.offset, 2 * mesh.rank());
    EXPECT_TRUE(testing::equal(weight.local.detach(),
                               torch::arange(12).view({3, 4}).narrow(1, weight.offset, 2)));
    const auto state = model_state(linear);
    const auto& box = std::get<Box>(state.at("weight").as_tensor().pieces.at(0).slice);
    EXPECT_EQ(box.offsets, (Shape{0, weight.offset}));
    EXPECT_EQ(box.sizes, (Shape{3, 2}));
  });
}

TEST(Placement, OfDimensionsThatDoNotFitIsRefused_F4) {
  run_mesh(2, [](Mesh& mesh) {
    const auto shard_along = [&](int dim) {
      nn::Linear linear(3, 4);
      return error_of([&] {
        fully_shard(linear, mesh, {.shard_placement = [dim](const torch::Tensor& parameter) {
                      return parameter.dim() == 2 ? std::optional(dim) : std::nullopt;
                    }});
      });
    };
    EXPECT_THAT(shard_along(1), HasSubstr("does not support uneven sharding on dim 1"));
    EXPECT_THAT(shard_along(2), HasSubstr("dimension 2"));
    EXPECT_THAT(shard_along(-3), HasSubstr("dimension -3"));
    EXPECT_EQ(shard_along(-2), "no Error");
  });
}

TEST(ReshardAfterForward, ToSomeRanksTrainsAlike_F3_P4_P11) {
  run_mesh(4, [](Mesh& mesh) { expect_reference(mesh, {.reshard_after_forward_ranks = 2}); });
}

TEST(ReshardAfterForward, ToSomeRanksGathersFromThemInBackward_F3) {
  Counts all[4], part[4];
  run_mesh(4, [&](Mesh& mesh) {
    auto& over_all = all[mesh.rank()];
    auto& over_part = part[mesh.rank()];
    auto net = make_net({.blocks = 2});
    testing::count(mesh, over_all);
    testing::count(mesh.split(2).shard, over_part);
    const ShardOptions options{.reshard_after_forward_ranks = 2};
    for (auto& block : net->blocks) fully_shard(block, mesh, options);
    fully_shard(net, mesh, options);
    loss_of(net, batch_of(0, 0, mesh)).backward();
    over_all = over_part = {};
    loss_of(net, batch_of(0, 0, mesh)).backward();
    EXPECT_EQ(over_all.gathers, 3);  // forward; the root stays
    EXPECT_EQ(over_part.gathers, 2);
    EXPECT_EQ(over_all.reductions, 3);
    over_all = over_part = {};
    {
      const torch::NoGradGuard evaluate;
      loss_of(net, batch_of(0, 0, mesh));
    }
    EXPECT_EQ(over_all.gathers, 3);
    EXPECT_EQ(over_part.gathers, 0);
  });
}

TEST(ReshardAfterForward, ToANumberThatDoesNotDivideIsRefused_F3) {
  run_mesh(4, [](Mesh& mesh) {
    const auto with = [&](int ranks) {
      nn::Linear linear(3, 4);
      return error_of([&] { fully_shard(linear, mesh, {.reshard_after_forward_ranks = ranks}); });
    };
    EXPECT_THAT(with(3), HasSubstr("should be a factor of 4"));
    EXPECT_THAT(with(-1), HasSubstr("should be a factor of 4"));
    EXPECT_THAT(with(8), HasSubstr("should be a factor of 4"));
    EXPECT_EQ(with(1), "no Error");
    EXPECT_EQ(with(4), "no Error");
  });
}

// On the CPU there is nowhere to offload to: the same numbers, and shards on the CPU.
TEST(Offload, TrainsAlike_F6) {
  run_mesh(2, [](Mesh& mesh) {
    expect_reference(mesh, {.offload_to_cpu = true});
    nn::Linear linear(3, 4);
    fully_shard(linear, mesh, {.offload_to_cpu = true});
    EXPECT_TRUE(sharded_parameters(linear)[0].local.is_cpu());
  });
}

struct CoderImpl : nn::Module {
  nn::Linear in{nullptr}, out{nullptr};
  CoderImpl() {
    in = register_module("in", nn::Linear(4, 3));
    out = register_module("out", nn::Linear(3, 4));
  }
  torch::Tensor encode(const torch::Tensor& x) { return in(x); }
  torch::Tensor forward(const torch::Tensor& x) { return out(encode(x)); }
};
TESSERA_MODULE(Coder);

// A class as a program finds it: no holder of ours, no forward, plain calls inside.
struct Policy : nn::Module {
  nn::Linear in = register_module("in", nn::Linear(4, 3));
  nn::Linear out = register_module("out", nn::Linear(3, 4));
  torch::Tensor act(const torch::Tensor& x, double scale) {
    return out->forward(torch::tanh(in->forward(x))) * scale;
  }
  void add_to(torch::Tensor& sum, const torch::Tensor& x) { sum = sum + act(x, 1); }
};

std::vector<torch::Tensor> gradients_of(Policy& policy) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : policy.parameters()) gradients.push_back(parameter.grad().clone());
  return gradients;
}

// `policy` was called and its backward is over.
void expect_gradients(const std::shared_ptr<Policy>& policy,
                      const std::vector<torch::Tensor>& expected) {
  const auto parameters = sharded_parameters(policy);
  ASSERT_EQ(parameters.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto& mine = parameters[i].local;
    const auto rows = parameters[i].sharded
                          ? expected[i].narrow(0, parameters[i].offset, mine.size(0))
                          : expected[i];
    EXPECT_TRUE(testing::allclose(mine.grad(), rows)) << parameters[i].name();
  }
}

// 51, 2: for modules whose class cannot be changed it is said how they are called.
TEST(Calls, OfAClassThatIsNotMadeForThisAreSaid) {
  run_mesh(2, [](Mesh& mesh) {
    const auto whole = std::make_shared<Policy>();
    sync_module_states(whole, mesh);
    const auto x = torch::ones({2, 4});
    whole->act(x, 2).sum().backward();
    const auto expected = gradients_of(*whole);
    const auto copy = [&] {
      auto made = std::make_shared<Policy>();
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : made->named_parameters())
        parameter.value().copy_(whole->named_parameters()[parameter.key()]);
      return made;
    };
    {
      auto act = fully_shard(copy(), mesh, &Policy::act, {.reshard_after_forward = true});
      act(x, 2.0).sum().backward();
      expect_gradients(act.module(), expected);
      EXPECT_EQ(unit_reports(act.module())[0].gathered_bytes, 0u);
    }
    {
      auto act = fully_shard(
          copy(), mesh, [](Policy& policy, const torch::Tensor& in) { return policy.act(in, 2); });
      auto same = act;
      same(x).sum().backward();
      expect_gradients(act.module(), expected);
    }
    {
      auto act = replicate(copy(), mesh, [](auto& policy, auto in) { return policy.act(in, 2); });
      act(x).sum().backward();
      expect_gradients(act.module(), expected);
    }
  });
}

TEST(Calls, OfAModuleThatIsKnownByItsBaseAreSaid) {
  run_mesh(2, [](Mesh& mesh) {
    const std::shared_ptr<nn::Module> module = std::make_shared<Policy>();
    sync_module_states(module, mesh);
    auto add = fully_shard(module, mesh,
                           [](nn::Module& given, torch::Tensor& sum, const torch::Tensor& in) {
                             dynamic_cast<Policy&>(given).add_to(sum, in);
                           });
    auto sum = torch::zeros({2, 4});
    add(sum, torch::ones({2, 4}));
    add(sum, torch::ones({2, 4}));
    sum.sum().backward();
    for (const auto& parameter : sharded_parameters(module))
      EXPECT_TRUE(parameter.local.grad().defined()) << parameter.name();
    EXPECT_THAT(testing::error_of(
                    [&] { static_cast<void>(fully_shard(module, mesh, [](nn::Module&) {})); }),
                HasSubstr("applied to this module already"));
  });
}

// What a call changes in its arguments reaches its caller, or is an error: nothing gets lost.
TEST(Calls, WhatTheyChangeIsNotLost) {
  run_mesh(2, [](Mesh& mesh) {
    const auto x = torch::ones({2, 4});
    const auto fill = [](Policy& policy, const torch::Tensor& in, torch::Tensor& out) noexcept {
      out = policy.act(in, 1);
    };
    const auto typed = fully_shard(std::make_shared<Policy>(), mesh, fill);
    torch::Tensor out;
    typed(x, out);
    EXPECT_EQ(out.sizes(), x.sizes());

    auto generic =
        fully_shard(std::make_shared<Policy>(), mesh,
                    [](auto& policy, auto& in, auto& made) { made = policy.act(in, 1); });
    torch::Tensor lost;
    EXPECT_THAT(error_of([&] { generic(x, lost); }), HasSubstr("has changed an argument"));
    abandon_step(generic.module());
    auto reads =
        fully_shard(std::make_shared<Policy>(), mesh,
                    [](auto& policy, auto& in, auto same) { return policy.act(in, 1) + same; });
    auto y = x;
    EXPECT_EQ(reads(y, y).sizes(), x.sizes());
    EXPECT_TRUE(y.is_same(x));
  });
}

TEST(Calls, NeedAModule) {
  const std::shared_ptr<Policy> none;
  const auto call = [](Policy&, const torch::Tensor& x) { return x; };
  EXPECT_THAT(error_of([&] { static_cast<void>(fully_shard(none, Mesh(), call)); }),
              HasSubstr("a null pointer for a module"));
  EXPECT_THAT(error_of([&] { static_cast<void>(CalledModule(none, call)); }),
              HasSubstr("a null pointer for a module"));
}

TEST(Calls, OfOtherMethodsAreSeen_F42) {
  run_mesh(2, [](Mesh& mesh) {
    Coder coder;
    auto x = torch::ones({2, 4});
    const auto expected = coder->encode(x).detach();
    EXPECT_TRUE(
        testing::equal(call_method(&CoderImpl::encode, coder, x), expected));  // no unit yet
    sync_module_states(coder, mesh);
    fully_shard(coder, mesh, {.reshard_after_forward = true});
    const auto code = call_method(&CoderImpl::encode, coder, x);
    EXPECT_EQ(unit_reports(coder)[0].gathered_bytes, 0u);
    code.sum().backward();
    for (const auto& parameter : sharded_parameters(coder)) {
      const bool used = parameter.name().starts_with("in.");
      EXPECT_EQ(parameter.local.grad().defined(), used) << parameter.name();
    }
  });
}

}  // namespace
}  // namespace tessera
