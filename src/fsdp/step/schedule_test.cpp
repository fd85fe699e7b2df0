// When units are gathered, freed and reduced: what a Trace of one step shows (spec 6.3, PF, RL,
// T6).
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/testing.h"
#include "fsdp/testing/counting_transport.h"
#include "fsdp/testing/test_training.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/trace.h"
#include "tessera/unit_controls.h"
#include "torch/compat.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::batch;
using testing::batch_of;
using testing::BlockImpl;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

std::string unit_name(const std::string& unit) {
  return unit.empty() ? "root" : unit;
}

// Lines "start_gather block1", without steps that `but` names.
std::vector<std::string> lines_of(const Trace& trace, const std::set<TraceStep>& but = {}) {
  std::vector<std::string> lines;
  for (const auto& event : trace.events()) {
    if (but.contains(event.step)) continue;
    lines.push_back(std::string(to_string(event.step)) + " " + unit_name(event.unit));
  }
  return lines;
}

const std::set<TraceStep> kAllButGathersAndCalls{
    TraceStep::wait_gather,   TraceStep::finish_gather, TraceStep::free,
    TraceStep::start_reduce,  TraceStep::wait_reduce,   TraceStep::finish_reduce,
    TraceStep::leave_forward, TraceStep::leave_backward};

void train(Net& net, const Mesh& mesh, int step = 0) {
  net->zero_grad();
  loss_of(net, batch_of(step, 0, mesh)).backward();
}

// One step when the order is known.
std::vector<std::string> second_step(Net& net, const Mesh& mesh, const std::set<TraceStep>& but) {
  train(net, mesh);
  const Trace trace(net);
  train(net, mesh);
  return lines_of(trace, but);
}

// Two blocks and the root.
Net small(const Mesh& mesh, const ShardOptions& options) {
  auto net = make_net({.blocks = 2});
  for (auto& block : net->blocks) fully_shard(block, mesh, options);
  fully_shard(net, mesh, options);
  return net;
}

TEST(Schedule, PrefetchesTheNextUnitBothWays_PF2_PF3_R4_R6) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = small(mesh, {});
    EXPECT_THAT(second_step(net, mesh, kAllButGathersAndCalls),
                ElementsAre("start_gather root", "start_gather block0", "enter_forward root",
                            "start_gather block1", "enter_forward block0", "enter_forward block1",
                            // the root stays gathered
                            "start_gather block1", "enter_backward root", "start_gather block0",
                            "enter_backward block1", "enter_backward block0"));
  });
}

TEST(Schedule, WithoutPrefetchAUnitIsGatheredWhenItIsNeeded_E3) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = small(mesh, {.backward_prefetch = std::nullopt, .forward_prefetch = false});
    EXPECT_THAT(second_step(net, mesh, kAllButGathersAndCalls),
                ElementsAre("start_gather root", "enter_forward root", "start_gather block0",
                            "enter_forward block0", "start_gather block1", "enter_forward block1",
                            "enter_backward root", "start_gather block1", "enter_backward block1",
                            "start_gather block0", "enter_backward block0"));
  });
}

TEST(Schedule, PostPrefetchComesAfterTheFree_E3) {
  run_mesh(2, [](Mesh& mesh) {
    auto net =
        small(mesh, {.backward_prefetch = BackwardPrefetch::post, .forward_prefetch = false});
    auto but = kAllButGathersAndCalls;
    but.erase(TraceStep::free);
    const auto lines = second_step(net, mesh, but);
    const std::vector<std::string> backward(std::ranges::find(lines, "enter_backward root"),
                                            lines.end());
    EXPECT_THAT(backward, ElementsAre("enter_backward root", "start_gather block1",
                                      "enter_backward block1", "free block1", "start_gather block0",
                                      "enter_backward block0", "free block0", "free root"));
  });
}

TEST(Schedule, GathersOverlapCallsAndReductionsOverlapBackward) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = small(mesh, {});
    const auto lines = second_step(net, mesh, {});
    const auto at = [&](const std::string& line, int occurrence = 0) {
      auto found = std::ranges::find(lines, line);
      for (; occurrence > 0; --occurrence) found = std::find(found + 1, lines.end(), line);
      EXPECT_NE(found, lines.end()) << line;
      return found - lines.begin();
    };
    // block1's gather is under way while block0 computes, in forward and in reverse in backward.
    EXPECT_LT(at("start_gather block1"), at("enter_forward block0"));
    EXPECT_GT(at("wait_gather block1"), at("leave_forward block0"));
    EXPECT_LT(at("start_gather block0", 1), at("enter_backward block1"));
    EXPECT_GT(at("wait_gather block0", 1), at("leave_backward block1"));
    // block1's gradients travel during block0's backward.
    EXPECT_LT(at("start_reduce block1"), at("enter_backward block0"));
    EXPECT_GT(at("wait_reduce block1"), at("leave_backward block0"));
  });
}

TEST(Schedule, AtMostTwoGathersAreUnderWay_K5_K6_RL5) {
  for (const auto prefetch : {BackwardPrefetch::pre, BackwardPrefetch::post}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto net = make_net({.blocks = 5});
      const ShardOptions options{.backward_prefetch = prefetch};
      for (auto& block : net->blocks) fully_shard(block, mesh, options);
      fully_shard(net, mesh, options);
      train(net, mesh);
      const Trace trace(net);
      train(net, mesh);
      int under_way = 0;
      int most = 0;
      int whole = 0;
      int most_whole = 0;
      for (const auto& event : trace.events()) {
        if (event.step == TraceStep::start_gather) most = std::max(most, ++under_way);
        if (event.step == TraceStep::finish_gather) {
          --under_way;
          most_whole = std::max(most_whole, ++whole);
        }
        if (event.step == TraceStep::free) --whole;
      }
      EXPECT_EQ(most, 1);        // the one that comes next: what is needed now is here already
      EXPECT_EQ(most_whole, 2);  // the root and one block
      EXPECT_EQ(under_way, 0);
      EXPECT_EQ(whole, 0);
    });
  }
}

TEST(Schedule, AnotherOrderGivesTheSameNumbersAndOneMoreGatherAtMost_PF7) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = small(mesh, {});
    auto plain = make_net({.blocks = 2});
    const auto swap = [](Net& model) { std::swap(model->blocks[0], model->blocks[1]); };
    for (int step = 0; step < 4; ++step) {
      if (step >= 2) {
        swap(net);
        swap(plain);
      }
      const auto loss = loss_of(net, batch(step, 0, 1));
      net->zero_grad();
      loss.backward();
      const auto expected = loss_of(plain, batch(step, 0, 1));
      EXPECT_NEAR(loss.item<float>(), expected.item<float>(), 1e-6) << step;
    }
    for (const auto& unit : unit_reports(net)) EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
  });
}

// Order over ranks and iterations -----------------------------------------------------------------

TEST(ForwardOrder, ThatDiffersAmongRanksIsAnErrorOnAll_EO3_X43_T12) {
  run_mesh(3, [](Mesh& mesh) {
    auto net = small(mesh, {});
    if (mesh.rank() == 2) std::swap(net->blocks[0], net->blocks[1]);
    EXPECT_THAT(error_of([&] { train(net, mesh); }),
                HasSubstr("Forward order differs across ranks: rank 0 is all-gathering parameters "
                          "for unit 'block0' while rank 2 is all-gathering parameters for unit "
                          "'block1'"));
    // After a reset all ranks compare again.
    abandon_step(net);
    if (mesh.rank() == 2) std::swap(net->blocks[0], net->blocks[1]);
    EXPECT_EQ(error_of([&] { train(net, mesh); }), "no Error");
    EXPECT_EQ(error_of([&] { train(net, mesh); }), "no Error");
  });
}

TEST(ForwardOrder, IsNotComparedInEvaluation_EO2) {
  run_mesh(2, [](Mesh& mesh) {
    testing::Counts counts;
    testing::count(mesh, counts);
    auto net = small(mesh, {});
    const auto before = counts.messages;
    {
      const torch::NoGradGuard evaluate;
      std::swap(net->blocks[0], net->blocks[1]);
      loss_of(net, batch(0, 0, 1));
      std::swap(net->blocks[0], net->blocks[1]);
    }
    EXPECT_EQ(counts.messages, before);
    // The first training pass is the first one that counts.
    train(net, mesh);
    EXPECT_GT(counts.messages, before);
  });
}

TEST(ForwardOrder, OfALaterIterationWarnsInTheFirstOneOnly_EO4_X44_E8) {
  const auto warnings = testing_support::warnings_of([&] {
    run_mesh(2, [&](Mesh& mesh) {
      auto net = small(mesh, {});
      train(net, mesh);
      std::swap(net->blocks[0], net->blocks[1]);
      train(net, mesh);
      train(net, mesh);
    });
  });
  ASSERT_EQ(warnings.size(), 4u);  // two units on two ranks, once
  EXPECT_THAT(warnings.front(),
              HasSubstr("Forward order differs from that of the first iteration"));
  EXPECT_THAT(warnings.front(), HasSubstr("Expected to all-gather for unit 'block0' but trying to "
                                          "all-gather parameters for unit 'block1'"));
}

// What users may change ---------------------------------------------------------------------------

TEST(UnitControls, PrefetchListsAreFollowed_F28) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = small(mesh, {});
    set_modules_to_forward_prefetch(net, {net->blocks[0], net->blocks[1]});
    set_modules_to_backward_prefetch(net, {net->blocks[1], net->blocks[0]});
    EXPECT_THAT(second_step(net, mesh, kAllButGathersAndCalls),
                ElementsAre("start_gather root", "start_gather block0", "start_gather block1",
                            "enter_forward root", "enter_forward block0", "enter_forward block1",
                            "start_gather block1", "start_gather block0", "enter_backward root",
                            "enter_backward block1", "enter_backward block0"));
    EXPECT_THAT(error_of([&] { set_modules_to_forward_prefetch(net, {net->embed}); }),
                HasSubstr("takes a module that fully_shard was applied to"));
  });
}

TEST(UnitControls, ReshardAfterForwardAndBackwardCanBeChanged_F26_F27) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = small(mesh, {});
    const auto gathered = [&](const std::string& name) {
      for (const auto& unit : unit_reports(net)) {
        if (unit.name == name) return unit.gathered_bytes > 0;
      }
      return false;
    };
    set_reshard_after_forward(net->blocks[0], false);
    set_reshard_after_forward(net, true, /*recurse=*/false);
    const auto loss = loss_of(net, batch(0, 0, 1));
    EXPECT_TRUE(gathered("block0"));
    EXPECT_FALSE(gathered("block1"));
    EXPECT_FALSE(gathered(""));  // the rule for roots is for those that were not asked
    set_reshard_after_backward(net, false);
    loss.backward();
    EXPECT_TRUE(gathered("block0") && gathered("block1") && gathered(""));
    set_reshard_after_backward(net, true);
    loss_of(net, batch(0, 0, 1)).backward();
    EXPECT_FALSE(gathered("block0") || gathered("block1") || gathered(""));
  });
}

TEST(UnitControls, ReductionsMayOutliveABackward_F23) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = small(mesh, {});
    auto expected = small(mesh, {});
    set_is_last_backward(net, false);
    for (int micro = 0; micro < 2; ++micro) {
      if (micro == 1) set_is_last_backward(net, true);
      const Trace trace(net);
      loss_of(net, batch_of(0, micro, mesh)).backward();
      const auto lines = lines_of(trace);
      // The root's is the last to start; the second backward finishes that of the first too.
      EXPECT_EQ(std::ranges::count(lines, "finish_reduce root"), 2 * micro);
      loss_of(expected, batch_of(0, micro, mesh)).backward();
    }
    const auto mine = sharded_parameters(net);
    const auto theirs = sharded_parameters(expected);
    for (std::size_t i = 0; i < mine.size(); ++i)
      EXPECT_TRUE(testing::equal(mine[i].local.grad(), theirs[i].local.grad())) << mine[i].name();
  });
}

TEST(UnitControls, SumsOverCopiesCanWait_F25) {
  run_mesh(4, [](Mesh& mesh) {
    const auto hybrid = mesh.split(2);
    const auto make = [&] {
      auto net = make_net({.blocks = 2});
      for (auto& block : net->blocks) fully_shard(block, hybrid);
      fully_shard(net, hybrid);
      return net;
    };
    auto net = make();
    auto expected = make();
    for (int micro = 0; micro < 3; ++micro) {
      set_requires_all_reduce(net, micro == 2);
      loss_of(net, batch_of(0, micro, mesh)).backward();
      EXPECT_EQ(sharded_parameters(net)[0].local.grad().defined(), micro == 2);
      loss_of(expected, batch_of(0, micro, mesh)).backward();
    }
    const auto mine = sharded_parameters(net);
    const auto theirs = sharded_parameters(expected);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(testing::allclose(mine[i].local.grad(), theirs[i].local.grad(), 1e-5, 1e-7))
          << mine[i].name();
    }
  });
}

TEST(UnitControls, FactorAndHookActOnTheSum_F30_F32) {
  run_mesh(2, [](Mesh& mesh) {
    torch::nn::Linear linear(2, 2);
    fully_shard(linear, mesh);
    const auto weight = sharded_parameters(linear)[0].local;
    set_gradient_divide_factor(linear, 4);
    call_module(linear, torch::ones({1, 2})).sum().backward();
    EXPECT_TRUE(testing::equal(weight.grad(), torch::full_like(weight, 0.5)));
    linear->zero_grad();
    set_all_reduce_hook(linear, [](torch::Tensor& sum) { sum.add_(6); });  // 2 + 6
    call_module(linear, torch::ones({1, 2})).sum().backward();
    EXPECT_TRUE(testing::equal(weight.grad(), torch::full_like(weight, 2)));
    EXPECT_THAT(error_of([&] { set_gradient_divide_factor(linear, 0); }), HasSubstr("positive"));
    linear->zero_grad();
  });
}

TEST(UnitControls, UnitsThatNeedNoParametersInBackward_F37) {
  run_mesh(2, [](Mesh& mesh) {
    torch::nn::Embedding table(5, 3);
    sync_module_states(table, mesh);
    fully_shard(table, mesh, {.reshard_after_forward = true});
    set_unshard_in_backward(table, false);
    call_module(table, torch::tensor({mesh.rank(), 4})).sum().backward();
    EXPECT_EQ(unit_reports(table)[0].gathers, 1u);
    const auto parameter = sharded_parameters(table)[0];
    const auto expected = torch::tensor(
        {{.5f, .5f, .5f}, {.5f, .5f, .5f}, {0.f, 0.f, 0.f}, {0.f, 0.f, 0.f}, {1.f, 1.f, 1.f}});
    EXPECT_TRUE(testing::equal(parameter.local.grad(),
                               expected.narrow(0, parameter.offset, parameter.local.size(0))));
  });
}

TEST(UnitControls, UnshardInTheBackgroundIsUsedByTheNextForward_F21_M26) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = small(mesh, {});
    train(net, mesh);
    const Trace trace(net);
    auto handle = start_unshard(net);
    EXPECT_THAT(lines_of(trace),
                ElementsAre("start_gather root", "start_gather block0", "start_gather block1"));
    loss_of(net, batch(0, 0, 1));
    EXPECT_EQ(std::ranges::count(lines_of(trace), "start_gather block0"), 1);
    handle.wait();
    handle.wait();
    EXPECT_EQ(net->blocks[0]->up->weight.sum().dim(), 0);  // can be read
    reshard(net);
    for (const auto& unit : unit_reports(net)) EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
  });
}

TEST(UnitControls, ReductionsUnderWayAreLimited_F35) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({.blocks = 6});
    testing::shard(net, mesh);
    train(net, mesh);
    const auto most_under_way = [&] {
      const Trace trace(net);
      train(net, mesh);
      int under_way = 0, most = 0;
      for (const auto& event : trace.events()) {
        if (event.step == TraceStep::start_reduce) most = std::max(most, ++under_way);
        if (event.step == TraceStep::finish_reduce) --under_way;
      }
      return most;
    };
    EXPECT_EQ(most_under_way(), 2);
    for (const int limit : {1, 3}) {
      set_reduce_scatter_max_input_buffers(net, limit);
      EXPECT_EQ(most_under_way(), limit);
    }
    set_reduce_scatter_max_input_buffers(net->blocks[0], 4, /*recurse=*/false);  // the largest
    EXPECT_EQ(most_under_way(), 4);
    EXPECT_THAT(error_of([&] { set_reduce_scatter_max_input_buffers(net, 0); }),
                HasSubstr("1 or more"));
  });
}

TEST(UnitControls, CollectivesMayBeTheUsers_F29) {
  run_mesh(2, [](Mesh& mesh) {
    auto expected = make_net({});
    testing::shard(expected, mesh);
    train(expected, mesh);
    auto net = make_net({});
    testing::shard(net, mesh);
    int gathers = 0, reductions = 0;
    auto& group = *mesh.process_group();
    set_custom_all_gather(net->blocks[0], [&](torch::Tensor& output, torch::Tensor& input) {
      ++gathers;
      EXPECT_EQ(output.numel(), 2 * input.numel());
      return compat::all_gather(group, output, input);
    });
    set_custom_reduce_scatter(net->blocks[0], [&](torch::Tensor& output, torch::Tensor& input) {
      ++reductions;
      compat::reduce_scatter(group, output, input)->wait();
      return c10::intrusive_ptr<c10d::Work>();  // done already
    });
    train(net, mesh);
    EXPECT_EQ(gathers, 2);
    EXPECT_EQ(reductions, 1);
    const auto mine = sharded_parameters(net), theirs = sharded_parameters(expected);
    for (std::size_t i = 0; i < mine.size(); ++i)
      EXPECT_TRUE(testing::equal(mine[i].local.grad(), theirs[i].local.grad())) << mine[i].name();
    auto whole = make_net({});
    replicate(whole, mesh);
    EXPECT_THAT(error_of([&] { set_custom_all_gather(whole, {}); }),
                HasSubstr("whose parameters are sharded"));
  });
}

// Ranges of the profiler --------------------------------------------------------------------------

thread_local std::vector<std::string>* ranges = nullptr;  // of this thread, while it records
std::unique_ptr<at::ObserverContext> record_range(const at::RecordFunction& function) {
  if (ranges != nullptr) ranges->emplace_back(function.name());
  return nullptr;
}

template <typename Step>
std::vector<std::string> ranges_of(Step&& step) {
  std::vector<std::string> names;
  ranges = &names;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(record_range).scopes({at::RecordScope::USER_SCOPE}));
  step();
  at::removeCallback(handle);
  ranges = nullptr;
  return names;
}

TEST(ProfilerRanges, HavePytorchsNames_6_21) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedDataParallel<Net> wrapped(
        make_net({.blocks = 2}), mesh,
        {.auto_wrap_policy = module_wrap_policy<BlockImpl>(), .forward_prefetch = true});
    auto net = wrapped.module();
    train(net, mesh);
    const auto first = ranges_of([&] { train(net, mesh); });
    for (const auto* name : {".forward", "._root_pre_forward", "._pre_forward", "._post_forward",
                             "._pre_forward_prefetch", "._pre_backward_hook",
                             "._pre_backward_prefetch", "._post_backward_hook"}) {
      EXPECT_THAT(first, ::testing::Contains("FullyShardedDataParallel" + std::string(name)));
    }
    EXPECT_EQ(std::ranges::count(first, "FullyShardedDataParallel.forward"), 3);
    auto sharded = small(mesh, {.backward_prefetch = BackwardPrefetch::post});
    train(sharded, mesh);
    const auto second = ranges_of([&] { train(sharded, mesh); });
    for (const auto* name :
         {"FSDP::root_pre_forward", "FSDP::pre_forward", "FSDP::pre_forward (block1)",
          "FSDP::post_forward (block0)", "FSDP::pre_backward (block0)",
          "FSDP::post_backward (block1)", "FSDP::backward_prefetch (block0)"}) {
      EXPECT_THAT(second, ::testing::Contains(std::string(name)));
    }
  });
}

struct ViewingImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  ViewingImpl() { linear = register_module("linear", torch::nn::Linear(2, 2)); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x).view({-1}); }
};
TESSERA_MODULE(Viewing);

TEST(Schedule, ResultsThatAreViewsWarnOnce_R5) {
  const auto warnings = testing_support::warnings_of([&] {
    run_mesh(2, [](Mesh& mesh) {
      Viewing viewing;
      fully_shard(viewing, mesh);
      for (int i = 0; i < 2; ++i) viewing(torch::ones({1, 2})).sum().backward();
    });
  });
  ASSERT_EQ(warnings.size(), 2u);  // one a rank
  EXPECT_THAT(warnings[0], HasSubstr("returned a view tensor"));
}

// The file ----------------------------------------------------------------------------------------

TEST(TraceFile, HasAProcessARankWithAllLanes) {
  // The path is this process's own: `fsdp` and `fsdp_gloo` run beside each other.
  const auto path = ::testing::TempDir() + "tessera_trace." + std::to_string(getpid()) + ".json";
  run_mesh(2, [&](Mesh& mesh) {
    auto net = small(mesh, {});
    const Trace trace(net);
    EXPECT_THAT(error_of([&] { const Trace second(net); }), HasSubstr("recorded already"));
    train(net, mesh);
    trace.write(path, mesh);
    EXPECT_THAT(error_of([&] { trace.write("/no such folder/trace.json", mesh); }),
                HasSubstr("/no such folder/trace.json"));
  });
  const auto all = nlohmann::json::parse(std::ifstream(path))["traceEvents"];
  std::map<std::string, int> lanes;
  for (const auto& event : all) {
    if (event["pid"] != 1 || !event.contains("cat")) continue;
    ++lanes[event["cat"].get<std::string>()];
    if (event["ph"] == "X") {
      EXPECT_GE(event["dur"].get<double>(), 0);
    }
  }
  EXPECT_EQ(lanes["forward"], 3);
  EXPECT_EQ(lanes["backward"], 3);
  EXPECT_EQ(lanes["gather"], 10);  // begin and end of two gathers a block and the root's one
  EXPECT_EQ(lanes["reduce"], 6);
  std::remove(path.c_str());
}

}  // namespace
}  // namespace tessera
