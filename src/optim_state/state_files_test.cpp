// A training that saved by libtorch alone goes on here (issue 51, 1): torch::save writes a model
// and its optimizer into files of their own, and any number of ranks load them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <string>
#include <vector>

#include "conformance/temporary_directory.h"
#include "fsdp/testing/test_training.h"
#include "optim_state/testing.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "tessera/training_state.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::half_net;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;
using testing::shard;
using testing::Way;

constexpr int kStepsBefore = 3, kStepsAfter = 3;

torch::optim::AdamW adamw_of(const std::vector<torch::Tensor>& tensors) {
  return torch::optim::AdamW(tensors,
                             torch::optim::AdamWOptions(0.01).weight_decay(0.02).amsgrad(true));
}

std::vector<double> trained(Net& net, torch::optim::Optimizer& optimizer, int first, int count) {
  std::vector<double> losses;
  for (int step = first; step < first + count; ++step) {
    optimizer.zero_grad();
    auto loss = loss_of(net, testing::batch(step, 0, 1));
    loss.backward();
    losses.push_back(loss.item<double>());
    optimizer.step();
  }
  return losses;
}

// What a program without Tessera leaves, and the losses of its next steps.
class SavedByLibtorch : public ::testing::Test {
 protected:
  SavedByLibtorch() {
    auto optimizer = adamw_of(net_->parameters());
    trained(net_, optimizer, 0, kStepsBefore);
    torch::save(net_, model_);
    torch::save(optimizer, optimizer_);
    next_ = trained(net_, optimizer, kStepsBefore, kStepsAfter);
  }

  TemporaryDirectory directory_;
  std::string model_ = directory_.path() + "/net.pt", optimizer_ = directory_.path() + "/opt.pt";
  Net net_ = make_net({});
  std::vector<double> next_;
};

TEST_F(SavedByLibtorch, GoesOnOnAnyRanks) {
  for (const Way way :
       {Way::whole, Way::replicated, Way::rows, Way::flat, Way::original, Way::aligned}) {
    for (const int world : {1, 3}) {
      run_mesh(world, [&](Mesh& mesh) {
        auto net = half_net();
        shard(net, way, mesh);
        auto optimizer = adamw_of(local_tensors(sharded_parameters(net)));
        TrainingState state(net, optimizer);
        state.values.set_item("step", 7);
        const auto report = load(state, {.model = model_, .optimizer = optimizer_});
        EXPECT_THAT(report.missing, ::testing::IsEmpty());
        EXPECT_THAT(report.extra, ::testing::IsEmpty());
        EXPECT_EQ(state.values.at("step").as_int(), 7);
        testing::expect_losses(trained(net, optimizer, kStepsBefore, kStepsAfter), next_);
      });
    }
  }
}

// A model alone, of every kind that has one.
TEST_F(SavedByLibtorch, AModelAloneIsLoaded) {
  const std::string pt = directory_.path() + "/flat.pt",
                    safe = directory_.path() + "/flat.safetensors",
                    dcp = directory_.path() + "/dcp";
  convert(model_, pt, {.to = CheckpointKind::torch_file});
  convert(model_, safe, {.to = CheckpointKind::safetensors});
  convert(model_, dcp, {.to = CheckpointKind::dcp});
  const auto expected = [&] {
    auto net = half_net();
    TrainingState state(net);
    load(state, model_);
    std::vector<torch::Tensor> values;
    for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
    return values;
  }();
  EXPECT_FALSE(testing::equal(expected[0], torch::full_like(expected[0], 0.5)));
  for (const auto& from : {model_, pt, safe, dcp}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto net = half_net();
      shard(net, Way::rows, mesh);
      TrainingState state(net);
      load(state, from);
      unshard(net);
      const auto loaded = net->parameters();
      for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(testing::equal(loaded[i].detach(), expected[i])) << from << " " << i;
    });
  }
}

// What has none of the model's names is no model: values are found where they are.
TEST(ValuesAlone, AreFoundWhereAModelIsMissing) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/values";
  save(Value::dict({{"step", 7}}), path);
  auto net = half_net();
  TrainingState state(net);
  state.values.set_item("step", 0);
  LoadOptions options;
  options.missing = OnDifference::report;
  const auto report = load(state, path, options);
  EXPECT_EQ(state.values.at("step").as_int(), 7);
  EXPECT_EQ(report.missing.size(), net->named_parameters().size());
}

TEST_F(SavedByLibtorch, WhatDoesNotFitChangesNothing) {
  run_mesh(2, [&](Mesh& mesh) {
    auto net = half_net();
    shard(net, Way::rows, mesh);
    const auto tensors = local_tensors(sharded_parameters(net));
    auto optimizer = adamw_of(tensors);
    TrainingState state(net, optimizer);
    const auto refusal = [&](const StateFiles& files) {
      return testing::error_of([&] { load(state, files); });
    };
    EXPECT_THAT(refusal({.model = model_, .optimizer = model_}), HasSubstr("no list of groups"));
    EXPECT_THAT(refusal({.model = optimizer_, .optimizer = optimizer_}), HasSubstr("not_found"));
    EXPECT_TRUE(optimizer.state().empty());
    for (const auto& tensor : tensors)
      EXPECT_TRUE(testing::equal(tensor, torch::full_like(tensor, 0.5)));

    const std::vector<torch::Tensor> first{tensors[0]}, rest(tensors.begin() + 1, tensors.end());
    torch::optim::AdamW two(std::vector<torch::optim::OptimizerParamGroup>{first, rest});
    TrainingState in_two(net, two);
    EXPECT_THAT(
        testing::error_of([&] { load(in_two, {.model = model_, .optimizer = optimizer_}); }),
        HasSubstr("the file has 1 group, the optimizer here 2"));
    TrainingState without(net);
    EXPECT_THAT(
        testing::error_of([&] { load(without, {.model = model_, .optimizer = optimizer_}); }),
        HasSubstr("a state without one"));
  });
}

// Moments that are there already, of the form that the file has, are filled in place.
TEST_F(SavedByLibtorch, AModelThatDoesNotFitLeavesTheMoments) {
  const auto moments = directory_.path() + "/moments.pt";
  auto net = half_net();
  auto optimizer = adamw_of(net->parameters());
  trained(net, optimizer, 0, 1);
  const auto python = optimizer_state_dict(optimizer);
  save(python, moments);
  TrainingState state(net, optimizer);
  load(state, {.model = model_, .optimizer = moments});  // in the form that this file has
  trained(net, optimizer, 0, 2);
  const auto first = net->parameters().front();
  const auto moment_of = [&] {
    const auto* held = optimizer.state().at(first.unsafeGetTensorImpl()).get();
    return static_cast<const torch::optim::AdamWParamState&>(*held).exp_avg();
  };
  const auto weight = first.detach().clone(), moment = moment_of().clone();
  EXPECT_THAT(testing::error_of([&] { load(state, {.model = optimizer_, .optimizer = moments}); }),
              HasSubstr("20 keys are not in the checkpoint"));
  EXPECT_TRUE(testing::equal(first.detach(), weight) && testing::equal(moment_of(), moment));

  const auto damaged = directory_.path() + "/damaged.safetensors";
  convert(model_, damaged, {.to = CheckpointKind::safetensors});
  std::fstream file(damaged, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('!');
  file.close();
  EXPECT_THAT(testing::error_of([&] { load(state, {.model = damaged, .optimizer = moments}); }),
              HasSubstr("corrupt"));
  EXPECT_TRUE(first.isnan().all().item<bool>() && moment_of().isnan().all().item<bool>());
}

// One call each, by a program of one process; its files grow into more ranks (issue 51, 2).
TEST(SavedInOneCall, AProgramOfOneProcessGrows) {
  const TemporaryDirectory directory;
  for (const std::string& path : {directory.path() + "/run", directory.path() + "/all.pt"}) {
    auto net = make_net({});
    auto optimizer = adamw_of(net->parameters());
    trained(net, optimizer, 0, kStepsBefore);
    tessera::save(net, optimizer, path);
    const auto expected = trained(net, optimizer, kStepsBefore, kStepsAfter);
    run_mesh(2, [&](Mesh& mesh) {
      auto same = half_net();
      shard(same, Way::rows, mesh);
      auto other = adamw_of(local_tensors(sharded_parameters(same)));
      tessera::load(same, other, path);
      testing::expect_losses(trained(same, other, kStepsBefore, kStepsAfter), expected);
    });
  }
}

}  // namespace
}  // namespace tessera
