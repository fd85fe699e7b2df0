// A training that saved by libtorch alone goes on here (issue 51, 1): torch::save writes a model
// and its optimizer into files of their own, and any number of ranks load them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
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

using testing::Optimizer;
using Tensors = std::vector<torch::Tensor>;
using Make = std::function<Optimizer(const Tensors&)>;

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

Optimizer make_adamw(const Tensors& tensors) {
  return std::make_unique<torch::optim::AdamW>(adamw_of(tensors));
}

// What a program without Tessera leaves, and the losses of its next steps with an optimizer that
// has each parameter once.
struct Left {
  explicit Left(bool tied = false) : Left(make_net({.tied = tied})) {}
  explicit Left(const Net& of) : Left(of, of->parameters()) {}
  Left(Net of, const Tensors& optimized, Make optimizer_of = make_adamw)
      : net(std::move(of)), make(std::move(optimizer_of)) {
    const auto optimizer = make(optimized);
    trained(net, *optimizer, 0, kStepsBefore);
    torch::save(net, model);
    torch::save(*optimizer, state);
    const auto once = make(local_tensors(sharded_parameters(net)));
    once->state() = std::move(optimizer->state());
    next = trained(net, *once, kStepsBefore, kStepsAfter);
  }

  TemporaryDirectory directory;
  std::string model = directory.path() + "/net.pt", state = directory.path() + "/opt.pt";
  Net net;
  Make make;
  std::vector<double> next;
};

class SavedByLibtorch : public ::testing::Test {
 protected:
  Left left_;
  const TemporaryDirectory& directory_ = left_.directory;
  const std::string &model_ = left_.model, &optimizer_ = left_.state;
  const std::vector<double>& next_ = left_.next;
};

constexpr Way kFilesWays[] = {Way::whole, Way::replicated, Way::rows,
                              Way::flat,  Way::original,   Way::aligned};

// Loads into a net of other values that is sharded so, and trains on.
void expect_next(const Left& left, Way way, int world, bool tied) {
  run_mesh(world, [&](Mesh& mesh) {
    auto net = half_net(tied);
    shard(net, way, mesh);
    const auto optimizer = left.make(local_tensors(sharded_parameters(net)));
    TrainingState state(net, *optimizer);
    state.values.set_item("step", 7);
    const auto report = load(state, {.model = left.model, .optimizer = left.state});
    EXPECT_THAT(report.missing, ::testing::IsEmpty());
    EXPECT_THAT(report.extra, ::testing::IsEmpty());
    EXPECT_EQ(state.values.at("step").as_int(), 7);
    testing::expect_losses(trained(net, *optimizer, kStepsBefore, kStepsAfter), left.next,
                           testing::name_of(way));
  });
}

TEST_F(SavedByLibtorch, GoesOnOnAnyRanks) {
  for (const Way way : kFilesWays)
    for (const int world : {1, 3}) expect_next(left_, way, world, false);
}

TEST(OtherOptimizersOfLibtorch, GoOn) {
  const Make makes[] = {
      [](const Tensors& tensors) {
        return std::make_unique<torch::optim::SGD>(tensors, testing::sgd_options());
      },
      [](const Tensors& tensors) {
        return std::make_unique<torch::optim::Adam>(tensors, torch::optim::AdamOptions(0.01));
      },
      [](const Tensors& tensors) {
        const auto options = torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true);
        return std::make_unique<torch::optim::RMSprop>(tensors, options);
      },
      [](const Tensors& tensors) {
        return std::make_unique<torch::optim::Adagrad>(tensors, torch::optim::AdagradOptions(0.05));
      }};
  for (const Make& make : makes) {
    const auto net = make_net({});
    const Left left(net, net->parameters(), make);
    for (const Way way : {Way::whole, Way::rows, Way::flat}) expect_next(left, way, 2, false);
  }
}

// A tied parameter has two names in the model's file. An optimizer has it once, or as often as
// parameters() of libtorch names it, and its moments once.
TEST(TiedByLibtorch, GoOnOnAnyRanks) {
  const auto net = make_net({.tied = true});
  ASSERT_EQ(net->parameters().size(), sharded_parameters(net).size() + 1);
  const Left once(net, local_tensors(sharded_parameters(net)));
  const Left twice(/*tied=*/true);
  for (const Way way : kFilesWays)
    for (const int world : {1, 3})
      for (const Left* left : {&once, &twice}) expect_next(*left, way, world, true);
}

// An optimizer that has it twice goes on as it did, and is saved.
TEST(TiedByLibtorch, AnOptimizerMayHaveOneTwice) {
  Left left(/*tied=*/true);
  auto net = half_net(true);
  auto optimizer = adamw_of(net->parameters());
  TrainingState state(net, optimizer);
  load(state, {.model = left.model, .optimizer = left.state});
  const auto run = left.directory.path() + "/run";
  save(state, run);
  const auto losses = trained(net, optimizer, kStepsBefore, kStepsAfter);
  auto same = half_net(true);
  auto other = adamw_of(same->parameters());
  TrainingState again(same, other);
  load(again, run);
  EXPECT_EQ(trained(same, other, kStepsBefore, kStepsAfter), losses);
  // Rows of it, saved where it stood twice.
  run_mesh(2, [&](Mesh& mesh) {
    auto rows = half_net(true);
    shard(rows, Way::rows, mesh);
    auto once = adamw_of(local_tensors(sharded_parameters(rows)));
    TrainingState sharded(rows, once);
    load(sharded, run);
    testing::expect_losses(trained(rows, once, kStepsBefore, kStepsAfter), left.next);
  });
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

// Ranks that do not mean the same: all are told, and nothing has changed.
class RanksThatDisagree : public SavedByLibtorch {
 protected:
  // What each of two ranks is told whose nets are sharded by rows; `files_of` and `optimizer_of`
  // say what a rank has. Rank 0 comes first.
  template <typename FilesOf, typename OptimizerOf>
  std::vector<std::string> told(const FilesOf& files_of, const OptimizerOf& optimizer_of) {
    std::vector<std::string> told(2);
    run_mesh(2, [&](Mesh& mesh) {
      const auto rank = static_cast<std::size_t>(mesh.rank());
      auto net = half_net();
      shard(net, Way::rows, mesh);
      const auto tensors = local_tensors(sharded_parameters(net));
      auto optimizer = optimizer_of(mesh.rank(), tensors);
      TrainingState state(net, *optimizer);
      told[rank] = testing::error_of([&] { load(state, files_of(mesh.rank())); });
      if (told[rank] == "no Error") {
        testing::expect_losses(trained(net, *optimizer, kStepsBefore, kStepsAfter), next_);
        return;
      }
      for (const auto& tensor : tensors)
        EXPECT_TRUE(testing::equal(tensor, torch::full_like(tensor, 0.5))) << told[rank];
      EXPECT_TRUE(optimizer->state().empty());
    });
    return told;
  }
  template <typename FilesOf>
  std::vector<std::string> told(const FilesOf& files_of) {
    return told(files_of, [](int, const Tensors& tensors) { return make_adamw(tensors); });
  }
  [[nodiscard]] static StateFiles files(const std::string& directory) {
    return {.model = directory + "/net.pt", .optimizer = directory + "/opt.pt"};
  }
};

TEST_F(RanksThatDisagree, AboutWhichFileIsWhich) {
  const auto right = files(directory_.path());
  const StateFiles wrong{.model = right.optimizer, .optimizer = right.model};
  for (const int first : {0, 1}) {
    const auto files_of = [&](int rank) { return rank == first ? right : wrong; };
    EXPECT_THAT(told(files_of), ::testing::Each(HasSubstr("mismatch: rank 0 loads another file")));
  }
}

TEST_F(RanksThatDisagree, AboutTheOptimizer) {
  const auto both = [&](int) { return files(directory_.path()); };
  const auto groups = [&](int rank, const Tensors& tensors) {
    const Tensors first{tensors[0]}, rest(tensors.begin() + 1, tensors.end());
    return rank == 0 ? make_adamw(tensors)
                     : std::make_unique<torch::optim::AdamW>(
                           std::vector<torch::optim::OptimizerParamGroup>{first, rest});
  };
  EXPECT_THAT(told(both, groups),
              ::testing::Each(HasSubstr("the file has 1 group, the optimizer here 2")));
  const auto types = [&](int rank, const Tensors& tensors) -> Optimizer {
    if (rank == 0) return make_adamw(tensors);
    return std::make_unique<torch::optim::SGD>(tensors, testing::sgd_options());
  };
  const auto errors = told(both, types);
  EXPECT_THAT(errors, ::testing::Each(::testing::Not("no Error")));
  EXPECT_EQ(errors[0], errors[1]);
  const auto orders = [&](int rank, Tensors tensors) {
    if (rank == 1) std::ranges::reverse(tensors);
    return make_adamw(tensors);
  };
  EXPECT_THAT(told(both, orders), ::testing::Each(HasSubstr("mismatch")));
}

// Copies of each rank's own that are not the same.
TEST_F(RanksThatDisagree, AboutWhatTheFilesHold) {
  const TemporaryDirectory copies;
  const auto own = [&](int rank) { return files(copies.path() + "/" + std::to_string(rank)); };
  const auto copied = [&](const char* net, const char* opt) {
    std::filesystem::remove_all(copies.path());
    for (const int rank : {0, 1}) {
      const auto to = std::filesystem::path(copies.path()) / std::to_string(rank);
      std::filesystem::create_directories(to);
      const std::filesystem::path from = directory_.path();
      std::filesystem::copy_file(from / (rank == 0 ? "net.pt" : net), to / "net.pt");
      std::filesystem::copy_file(from / (rank == 0 ? "opt.pt" : opt), to / "opt.pt");
    }
  };
  copied("net.pt", "opt.pt");
  EXPECT_THAT(told(own), ::testing::Each("no Error"));
  const auto is_other = ::testing::Each(HasSubstr("conflict: rank 0 has opened another file"));
  for (const auto& [net, opt] : {std::pair("opt.pt", "net.pt"), std::pair("net.pt", "net.pt")}) {
    copied(net, opt);
    EXPECT_THAT(told(own), is_other);
  }
  // Of as many bytes, from another training.
  const Left other(half_net());
  copied("net.pt", "opt.pt");
  ASSERT_EQ(std::filesystem::file_size(other.model), std::filesystem::file_size(model_));
  std::filesystem::copy_file(other.model, own(1).model.path,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(told(own), is_other);
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

  const auto said_once = ::testing::Truly([](const std::string& told) {
    return told.find("NaN") != std::string::npos && told.find("NaN") == told.rfind("NaN");
  });
  const auto damaged = directory_.path() + "/damaged.safetensors";
  convert(model_, damaged, {.to = CheckpointKind::safetensors});
  std::fstream file(damaged, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('!');
  file.close();
  EXPECT_THAT(testing::error_of([&] { load(state, {.model = damaged, .optimizer = moments}); }),
              ::testing::AllOf(HasSubstr("corrupt"), said_once));
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
