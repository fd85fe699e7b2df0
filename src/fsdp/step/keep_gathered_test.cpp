// Units that stay gathered between forward and backward, as many as a budget allows
// (set_keep_gathered).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/trace.h"
#include "tessera/unit_controls.h"
#include "torch/test_device/device_mesh.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::loss_of;
using testing::run_mesh;

constexpr int kKeptBlocks = 4;
constexpr std::int64_t kNothing = 0, kEverything = 1 << 30;

// The net of the other tests, whose blocks may be computed again in backward.
struct KeptNetImpl : testing::NetImpl {
  using testing::NetImpl::NetImpl;
  bool by_checkpoints = false;
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embed(tokens);
    for (auto& block : blocks) x = by_checkpoints ? activation_checkpoint(block, x) : block(x);
    return head(x);
  }
};
TESSERA_MODULE(KeptNet);

KeptNet make_kept_net() {
  return testing::with_values(KeptNet(testing::NetOptions{.blocks = kKeptBlocks}), 7);
}

struct KeptWay {
  std::string name;
  std::function<void(KeptNet&, const Mesh&)> shard;
  int micros = 1;
  bool no_sync = false;
  bool by_checkpoints = false;
};

void shard_kept(KeptNet& net, const Mesh& mesh, const ShardOptions& options) {
  for (auto& block : net->blocks) fully_shard(block, mesh, options);
  fully_shard(net, mesh, options);
}

void shard_by_rows(KeptNet& net, const Mesh& mesh) {
  shard_kept(net, mesh, {});
}

void shard_fsdp1(KeptNet& net, const Mesh& mesh) {
  for (auto& block : net->blocks) FullyShardedDataParallel<testing::Block>(block, mesh);
  FullyShardedDataParallel<KeptNet>(net, mesh);
}

std::uint64_t bytes_of_block(KeptNet& net) {
  const Trace trace(net);
  {
    const torch::NoGradGuard no_grad;
    loss_of(net, testing::batch(0, 0, 1).to(sharded_parameters(net).front().local.device()));
  }
  const auto& events = trace.events();
  return std::ranges::find(events, "block0", &TraceEvent::unit)->bytes;
}

struct KeptRun {
  FullState state;
  std::vector<std::uint64_t> gathers;  // of each block, in the last step
  std::vector<std::uint64_t> held;     // of each block, between its forward and its backward
  std::int64_t peak = 0;               // of what was gathered at once, in the last step
};

std::vector<std::uint64_t> numbers_of_blocks(KeptNet& net, std::uint64_t UnitReport::*member) {
  std::vector<std::uint64_t> all;
  for (const auto& report : unit_reports(net)) {
    if (report.name.starts_with("block")) all.push_back(report.*member);
  }
  return all;
}

std::int64_t peak_of(const std::vector<TraceEvent>& events) {
  std::int64_t now = 0, peak = 0;
  for (const auto& event : events) {
    const auto bytes = static_cast<std::int64_t>(event.bytes);
    if (event.step == TraceStep::start_gather) now += bytes;
    if (event.step == TraceStep::free) now -= bytes;
    peak = std::max(peak, now);
  }
  return peak;
}

KeptRun train_kept(const Mesh& mesh, const KeptWay& way, std::int64_t keep_bytes,
                   const std::function<void(KeptNet&)>& then = {}) {
  auto net = make_kept_net();
  net->by_checkpoints = way.by_checkpoints;
  way.shard(net, mesh);
  set_keep_gathered(net, keep_bytes);
  if (then) then(net);
  torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), testing::sgd_options());
  KeptRun trained;
  for (int step = 0; step < testing::kSteps; ++step) {
    const auto before = numbers_of_blocks(net, &UnitReport::gathers);
    const Trace trace(net);
    net->zero_grad();
    for (int micro = 0; micro < way.micros; ++micro) {
      std::optional<NoSync> quiet;
      if (way.no_sync && micro + 1 < way.micros) quiet.emplace(net);
      const auto tokens = testing::batch_of(step, micro, mesh).to(mesh.device());
      const auto loss = loss_of(net, tokens);
      trained.held = numbers_of_blocks(net, &UnitReport::gathered_bytes);
      loss.backward();
    }
    trained.gathers = numbers_of_blocks(net, &UnitReport::gathers);
    for (int i = 0; i < kKeptBlocks; ++i) trained.gathers[i] -= before[i];
    trained.peak = peak_of(trace.events());
    EXPECT_THAT(numbers_of_blocks(net, &UnitReport::gathered_bytes), ElementsAre(0, 0, 0, 0));
    optimizer.step();
  }
  trained.state = full_state_dict(net, {.offload_to_cpu = true});
  return trained;
}

void expect_same_state(const FullState& found, const FullState& expected) {
  for (const auto& entry : expected)
    EXPECT_TRUE(torch::equal(entry.value(), found[entry.key()])) << entry.key();
}

std::vector<KeptWay> ways() {
  return {{.name = "rows", .shard = shard_by_rows},
          {.name = "flat",
           .shard = [](KeptNet& net,
                       const Mesh& mesh) { shard_kept(net, mesh, {.layout = ShardLayout::flat}); }},
          {.name = "FSDP1", .shard = shard_fsdp1},
          {.name = "micro-batches", .shard = shard_by_rows, .micros = 3},
          {.name = "no_sync", .shard = shard_by_rows, .micros = 3, .no_sync = true},
          {.name = "checkpoints", .shard = shard_by_rows, .by_checkpoints = true},
          {.name = "offload", .shard = [](KeptNet& net, const Mesh& mesh) {
             shard_kept(net, mesh, {.offload_to_cpu = true});
           }}};
}

// The last two of four, which need no gather in backward.
TEST(KeepGathered, KeepsTheLastUnitsThatTheBudgetHolds) {
  run_mesh(2, [](Mesh& mesh) {
    for (const auto& way : ways()) {
      SCOPED_TRACE(way.name);
      auto net = make_kept_net();
      way.shard(net, mesh);
      const auto block = bytes_of_block(net);
      const auto budget = static_cast<std::int64_t>(2 * block + block / 2);
      const auto without = train_kept(mesh, way, kNothing);
      const auto kept = train_kept(mesh, way, budget);
      const auto micros = static_cast<std::uint64_t>(way.micros);
      EXPECT_THAT(without.gathers, ElementsAre(2 * micros, 2 * micros, 2 * micros, 2 * micros));
      EXPECT_THAT(kept.gathers, ElementsAre(2 * micros, 2 * micros, micros, micros));
      EXPECT_THAT(without.held, ElementsAre(0, 0, 0, 0));
      EXPECT_THAT(kept.held, ElementsAre(0, 0, block, block));
      EXPECT_LE(kept.peak, without.peak + budget);
      EXPECT_THAT(train_kept(mesh, way, kEverything).gathers,
                  ElementsAre(micros, micros, micros, micros));
      expect_same_state(kept.state, without.state);
    }
  });
}

TEST(KeepGathered, WhatIsSetForAUnitDecides) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_kept_net();
    shard_by_rows(net, mesh);
    const auto block = static_cast<std::int64_t>(bytes_of_block(net));
    const KeptWay way{.name = "", .shard = shard_by_rows};
    // The last one may not stay, and the first one, which does, is not counted.
    const auto found = train_kept(mesh, way, block, [](KeptNet& one) {
      set_reshard_after_forward(one->blocks[3], true, false);
      set_reshard_after_forward(one->blocks[0], false, false);
    });
    EXPECT_THAT(found.gathers, ElementsAre(1, 2, 1, 2));
  });
}

// Those that the budget does not reach go on as they would.
TEST(KeepGathered, OthersAreParked) {
  run_mesh(4, [](Mesh& mesh) {
    const auto shard = [](KeptNet& net, const Mesh& over) {
      shard_kept(net, over, {.reshard_after_forward_ranks = 2});
    };
    const KeptWay way{.name = "", .shard = shard};
    auto net = make_kept_net();
    shard(net, mesh);
    const auto block = static_cast<std::int64_t>(bytes_of_block(net));
    const auto without = train_kept(mesh, way, kNothing);
    const auto kept = train_kept(mesh, way, block);
    EXPECT_THAT(kept.gathers, ElementsAre(2, 2, 2, 1));
    expect_same_state(kept.state, without.state);
  });
}

TEST(KeepGathered, ForwardsWithoutGradientsKeepNothing) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_kept_net();
    shard_by_rows(net, mesh);
    set_keep_gathered(net, kEverything);
    const auto tokens = testing::batch_of(0, 0, mesh);
    loss_of(net, tokens).backward();
    const torch::NoGradGuard no_grad;
    const Trace trace(net);
    loss_of(net, tokens);
    // The root, one block, and the next one on its way.
    std::map<std::string, std::int64_t> bytes;
    for (const auto& event : trace.events())
      bytes[event.unit] = static_cast<std::int64_t>(event.bytes);
    EXPECT_LE(peak_of(trace.events()), bytes[""] + 2 * bytes["block0"]);
  });
}

TEST(KeepGathered, RanksAndModulesThatDoNotFitAreRefused) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_kept_net();
    shard_by_rows(net, mesh);
    EXPECT_THAT(error_of([&] { set_keep_gathered(net, 100 + mesh.rank()); }),
                HasSubstr("rank 1 may keep 101 bytes, rank 0 100"));
    EXPECT_THAT(error_of([&] { set_keep_gathered(net, -1); }), HasSubstr("got -1"));
    set_keep_gathered(net->blocks[1], 100);
    const auto tokens = testing::batch_of(0, 0, mesh);
    EXPECT_THAT(error_of([&] { loss_of(net, tokens); }), HasSubstr("outermost module"));
    set_keep_gathered(net->blocks[1], 0);
    loss_of(net, tokens).backward();
    EXPECT_THAT(error_of([&] { set_keep_gathered(net->blocks[1], 100); }),
                HasSubstr("outermost module"));
  });
}

TEST(KeepGathered, OnADeviceToo) {
  testing::run_device_mesh(2, [](Mesh& mesh) {
    for (const auto& way : ways()) {
      SCOPED_TRACE(way.name);
      const auto without = train_kept(mesh, way, kNothing);
      const auto kept = train_kept(mesh, way, kEverything);
      const auto micros = static_cast<std::uint64_t>(way.micros);
      EXPECT_THAT(kept.gathers, ElementsAre(micros, micros, micros, micros));
      expect_same_state(kept.state, without.state);
    }
  });
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

}  // namespace
}  // namespace tessera
