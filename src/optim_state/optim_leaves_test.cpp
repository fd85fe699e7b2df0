// Optimizer state as a tree with PyTorch's names; keys as get_state_dict gives them.
#include "optim_state/optim_leaves.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>

#include "fsdp/state/model_state.h"
#include "fsdp/testing/test_training.h"
#include "tessera/error.h"
#include "tessera/leaf.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using detail::OptimLeaves;
using ::testing::ElementsAre;
using testing::keys;
using testing::run_mesh;
using testing::sharded_net;

AdamW make_grouped(testing::Net& net) {
  ParameterGroup decay{{}, {.lr = 0.01, .weight_decay = 0.1}},
      rest{{}, {.lr = 0.01, .weight_decay = 0}};
  for (auto& parameter : sharded_parameters(net)) {
    (parameter.shape.size() > 1 ? decay : rest).parameters.push_back(parameter);
  }
  return AdamW(std::vector<ParameterGroup>{decay, rest});
}

double train_step(testing::Net& net, AdamW& optimizer, int seed) {
  auto tokens = torch::arange(6).add(seed).remainder(testing::kVocabulary).view({2, 3});
  auto loss = net(tokens).square().mean();
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  return loss.item<double>();
}

TEST(OptimState, HasPytorchsKeysAndGroups) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = sharded_net(mesh, true);
    auto optimizer = make_grouped(net);
    train_step(net, optimizer, 0);
    const auto state = OptimLeaves(net, optimizer).tree();
    EXPECT_THAT(keys(state), ElementsAre("state", "param_groups"));
    const auto& one = state.at("state").at("embed.weight");
    EXPECT_THAT(keys(one), ElementsAre("step", "exp_avg", "exp_avg_sq"));
    EXPECT_EQ(tensor_of(one.at("step").as_tensor()).item<float>(), 1);
    EXPECT_TRUE(one.at("exp_avg").as_tensor().sharded);
    EXPECT_FALSE(one.at("step").as_tensor().sharded);
    const auto& group = state.at("param_groups").items().at(1);
    EXPECT_THAT(keys(group), ElementsAre("lr", "betas", "eps", "weight_decay", "amsgrad",
                                         "maximize", "foreach", "capturable", "differentiable",
                                         "fused", "decoupled_weight_decay", "params"));
    EXPECT_EQ(group.at("params").items().at(0).as_string(), "block0.norm.weight");
  });
}

// Copies the elements of every tensor leaf of `from` into the memory of `to`, as a load does.
void copy_tensors(const Value& from, const Value& to) {
  const auto source = flatten(from), target = flatten(to);
  for (std::size_t i = 0; i < source.size(); ++i) {
    ASSERT_EQ(source[i].name, target[i].name);
    if (!source[i].value.is(Value::Kind::tensor)) continue;
    const auto &a = source[i].value.as_tensor(), &b = target[i].value.as_tensor();
    const auto size = size_of(a.dtype);
    const auto &p = a.pieces[0], &q = b.pieces[0];
    std::memcpy(q.storage->data + q.storage_offset * size,
                p.storage->data + p.storage_offset * size, numel(p.slice) * size);
  }
}

void load_into(testing::Net& net, AdamW& optimizer, const Value& saved) {
  OptimLeaves leaves(net, optimizer);
  leaves.prepare(saved);
  auto tree = leaves.tree();
  copy_tensors(saved, tree);
  tree.set_item("param_groups", saved.at("param_groups"));
  leaves.finish(tree);
}

TEST(OptimState, ARunContinuesFromAnothersState) {
  run_mesh(2, [](Mesh& mesh) {
    auto first = sharded_net(mesh, false), second = sharded_net(mesh, false);
    auto one = make_grouped(first), two = make_grouped(second);
    for (int i = 0; i < 3; ++i) train_step(first, one, i);
    one.set_lr(0.005);
    train_step(second, two, 9);
    copy_tensors(model_state(first), model_state(second));
    const auto saved = OptimLeaves(first, one).tree();
    load_into(second, two, saved);
    EXPECT_EQ(two.options(1).lr, 0.005);
    for (int i = 3; i < 6; ++i)
      EXPECT_EQ(train_step(first, one, i), train_step(second, two, i)) << i;
  });
}

// Calls of libtorch's zeros() that `work` makes.
int zeros_made(const std::function<void()>& work) {
  static std::atomic<int> made;
  made = 0;
  const auto count = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
    if (std::strcmp(call.name(), "aten::zeros") == 0) ++made;
    return nullptr;
  };
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
  work();
  at::removeCallback(handle);
  return made;
}

TEST(OptimState, RoomThatIsThereIsNotMadeAgain) {
  run_mesh(1, [](Mesh& mesh) {
    auto net = sharded_net(mesh, false), fresh = sharded_net(mesh, false);
    auto optimizer = make_grouped(net), other = make_grouped(fresh);
    train_step(net, optimizer, 0);
    const auto saved = OptimLeaves(net, optimizer).tree();
    EXPECT_EQ(zeros_made([&] { OptimLeaves(net, optimizer).prepare(saved); }), 0);
    EXPECT_GT(zeros_made([&] { OptimLeaves(fresh, other).prepare(saved); }), 0);
  });
}

// FSDP1's flat parameters stand in the order of units, others in that of modules.
TEST(OptimState, TheOrderOfAGroupIsNoOtherGroup) {
  run_mesh(1, [](Mesh& mesh) {
    auto net = sharded_net(mesh, false);
    auto parameters = sharded_parameters(net);
    AdamW optimizer(parameters);
    std::ranges::reverse(parameters);
    AdamW other(parameters);
    other.set_lr(0.25);
    load_into(net, optimizer, OptimLeaves(net, other).tree());
    EXPECT_EQ(optimizer.options().lr, 0.25);
  });
}

TEST(OptimState, RefusesOtherGroups) {
  run_mesh(1, [](Mesh& mesh) {
    auto net = sharded_net(mesh, false);
    auto optimizer = make_grouped(net);
    AdamW other(sharded_parameters(net));
    EXPECT_THROW(load_into(net, other, OptimLeaves(net, optimizer).tree()), Error);
  });
}

// FSDP1: the state of a flat parameter has the names, shapes and pieces of the parameters in it.
TEST(OptimState, OfFlatParametersHasTheOriginalOnes) {
  for (const bool use_orig_params : {false, true}) {
    run_mesh(3, [&](Mesh& mesh) {
      const auto plain = testing::make_net({.blocks = 1});
      const FullyShardedDataParallel<testing::Net> net(
          testing::make_net({.blocks = 1}), mesh,
          {.auto_wrap_policy = module_wrap_policy<testing::BlockImpl>(),
           .use_orig_params = use_orig_params});
      AdamW optimizer(net.parameters());
      optimizer.make_state();
      const auto state = model_state(*net.module());
      const auto moments = OptimLeaves(*net.module(), optimizer).tree();
      const auto parameters = plain->named_parameters();
      for (const auto& whole : parameters) {
        const auto& leaf = state.at(whole.key()).as_tensor();
        const auto& moment = moments.at("state").at(whole.key()).at("exp_avg").as_tensor();
        EXPECT_EQ(moment.shape, whole.value().sizes().vec());
        EXPECT_EQ(moment.pieces.size(), leaf.pieces.size());
      }
      const auto& names = moments.at("param_groups").items().at(0).at("params").items();
      EXPECT_EQ(names.size(), parameters.size());
    });
  }
}

}  // namespace
}  // namespace tessera
