// Runs of nodes with disks of their own: fault-rows C09, C12, C13, F25.
#include <gmock/gmock.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <set>
#include <thread>

#include "base/process.h"
#include "checkpoint/run/testing.h"
#include "checkpoint/together/testing.h"
#include "value/inner_tensors.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kRanks = 4;

// Two stores or directories, of which each has two of four ranks.
struct NodeRun {
  std::vector<std::shared_ptr<Store>> stores{memory_store("node-0"), memory_store("node-1")};
  std::vector<std::string> paths = {};  // of directories; empty: they are stores

  [[nodiscard]] Location of(int rank) const {
    const auto node = static_cast<std::size_t>(rank / 2);
    return paths.empty() ? Location(stores[node]) : Location(paths[node]);
  }
  [[nodiscard]] RunCheckpoint at(const Group& group, std::int64_t step) const {
    return run_checkpoint(of(group.rank()), step);
  }
};

// Rows of olmo_legacy, flat parameters of olmo_local. Nodes save the same files as ranks that share
// a directory (Nodes.HaveTheFilesThatASharedDirectoryHas), and those do not wait for one another.
// Made once.
const Files& saved_by_ranks(CheckpointKind kind) {
  static std::mutex mutex;
  static std::map<CheckpointKind, Files> saved;
  const std::lock_guard lock(mutex);
  if (const auto known = saved.find(kind); known != saved.end()) return known->second;
  const auto store = memory_store();
  const Cut cut = kind == CheckpointKind::olmo_local ? Cut::flat : Cut::rows;
  save_by(kRanks, cut, Location(store, "step"), options_for(kind));
  return saved[kind] = files_in(*store, "step");
}

void add_step(NodeRun& run, CheckpointKind kind, std::int64_t step) {
  for (const auto& [name, bytes] : saved_by_ranks(kind)) {
    for (std::size_t node = 0; node < run.stores.size(); ++node) {
      if (is_of_other_node(name, node)) continue;
      put(*run.stores[node], run_checkpoint_name(step) + "/" + name, bytes, IfExists::fail);
    }
  }
}

NodeRun run_with(CheckpointKind kind, const std::vector<std::int64_t>& steps,
                 bool on_disk = false) {
  NodeRun run;
  for (std::size_t node = 0; on_disk && node < 2; ++node) {
    run.paths.push_back(temporary_directory() + "/node-" + std::to_string(node));
    run.stores[node] = posix_store(run.paths[node]);
  }
  for (const std::int64_t step : steps) add_step(run, kind, step);
  return run;
}

void lose(const NodeRun& run, std::size_t node, const std::string& directory) {
  for (const ObjectInfo& object : run.stores[node]->list(directory))
    run.stores[node]->remove(object.name);
  if (!run.paths.empty()) std::filesystem::remove_all(run.paths[node] + "/" + directory);
}

// The file with the model of rank 3, on node 1.
std::string file_of_last_rank(CheckpointKind kind) {
  return kind == CheckpointKind::olmo_local ? "/model/rank3.pt" : "/rank3.pt";
}

const std::vector<CheckpointKind> kKindsOnNodes = {CheckpointKind::olmo_local,
                                                   CheckpointKind::olmo_legacy};

// What all ranks say, which is one thing: the name of the latest and the warnings, or the error.
std::vector<std::string> latest_of(const NodeRun& run, const RunCheck& check = {}) {
  std::mutex mutex;
  std::set<std::vector<std::string>> said;
  run_ranks(kRanks, [&](Group& group) {
    std::vector<std::string> words;
    try {
      const LatestCheckpoint latest = latest_checkpoint(run.of(group.rank()), check, group);
      words = latest.warnings;
      words.insert(words.begin(), latest.found ? run_checkpoint_name(latest.found->step) : "none");
      if (latest.found) {
        EXPECT_EQ(to_string(latest.found->where),
                  to_string(run.at(group, latest.found->step).where));
      }
    } catch (const Error& error) {
      const std::string text = error.what();
      words = {text.substr(0, text.rfind(" ["))};  // the place is each rank's own
    }
    const std::lock_guard lock(mutex);
    said.insert(words);
  });
  EXPECT_EQ(said.size(), 1U);
  return *said.begin();
}

std::string on_this_host(int rank) {
  return "rank " + std::to_string(rank) + " on " + host_name();
}

void expect_newest_of_all_nodes(CheckpointKind kind, bool on_disk) {
  const NodeRun run = run_with(kind, {2, 4, 8, 12}, on_disk);
  EXPECT_THAT(latest_of(run), ElementsAre("step12"));
  lose(run, 1, "step12");
  EXPECT_THAT(latest_of(run), ElementsAre("step8", ::testing::AllOf(HasSubstr("step12 is damaged"),
                                                                    HasSubstr(on_this_host(2)))));
  lose(run, 0, "step8");
  run.stores[0]->remove("step4/config.yaml");  // not whole, as a kill leaves it
  const std::vector<std::string> said = latest_of(run);
  ASSERT_EQ(said.size(), 4U) << said[0];
  EXPECT_EQ(said[0], "step2");
  for (const std::size_t warning : {2, 3})
    EXPECT_THAT(said[warning], HasSubstr(on_this_host(0) + ": there is no such checkpoint"));
  run.stores[1]->remove("step2" + file_of_last_rank(kind));
  EXPECT_THAT(latest_of(run), ElementsAre(::testing::AllOf(HasSubstr("corrupt: every checkpoint"),
                                                           HasSubstr("(and 3 more)"))));
  // A node that has lost all it had is no fresh start.
  for (const char* step : {"step2", "step4", "step12"}) lose(run, 0, step);
  EXPECT_THAT(latest_of(run), ElementsAre(HasSubstr("corrupt: every checkpoint")));
}

TEST(RunOnNodes, TheLatestIsTheNewestThatAllNodesHave_C09) {
  for (const CheckpointKind kind : kKindsOnNodes) {
    for (const bool on_disk : {false, true}) {
      SCOPED_TRACE(std::string(to_string(kind)) + (on_disk ? " on disk" : ""));
      expect_newest_of_all_nodes(kind, on_disk);
    }
  }
}

TEST(RunOnNodes, EachNodeIsJudgedByItsOwnFiles_C09) {
  for (const CheckpointKind kind : kKindsOnNodes) {
    SCOPED_TRACE(to_string(kind));
    const NodeRun run = run_with(kind, {4, 8});
    const std::string name = "step8" + file_of_last_rank(kind);
    const std::vector<std::byte> whole_file = read_all(*run.stores[1]->open(name), 1 << 24);
    // Truncated.
    put(*run.stores[1], name, std::span(whole_file).first(whole_file.size() - 30),
        IfExists::replace);
    EXPECT_THAT(latest_of(run), ElementsAre("step4", HasSubstr(on_this_host(3))));
    // Another value of a tensor, which only a full read sees.
    std::vector<std::byte> other = whole_file;
    const Checkpoint file =
        Checkpoint::open({run.stores[1], "step4" + file_of_last_rank(kind)}, {.part = true});
    const auto tensors = all_tensors(file.leaves);
    const auto written = std::ranges::find_if(tensors, [](const auto& tensor) {
      const auto& pieces = tensor.tensor.as_tensor().pieces;
      return !pieces.empty() && pieces[0].storage->size > 0;
    });
    ASSERT_NE(written, tensors.end());
    other[written->tensor.as_tensor().pieces[0].storage->offset] ^= std::byte{1};
    put(*run.stores[1], name, other, IfExists::replace);
    EXPECT_THAT(latest_of(run), ElementsAre("step8"));
    EXPECT_THAT(latest_of(run, {.read_data = true}),
                ElementsAre("step4", HasSubstr(on_this_host(3))));
    put(*run.stores[1], name, whole_file, IfExists::replace);
    EXPECT_THAT(latest_of(run, {.read_data = true}), ElementsAre("step8"));
    // A node that could not publish has an older save of the same step.
    put(*run.stores[1], "step8/tessera-state.json", {}, IfExists::replace);
    EXPECT_THAT(latest_of(run), ElementsAre("step4", HasSubstr("are of another save than those")));
  }
}

TEST(RunOnNodes, WhatARankLeftBehindIsPassedOver_C11) {
  const NodeRun run = run_with(CheckpointKind::olmo_local, {4, 8});
  run_ranks(kRanks, [&](Group& group) { go_on_from(run.of(group.rank()), 4, group); });
  EXPECT_THAT(latest_of(run), ElementsAre("step4", HasSubstr("step8 is passed over")));
}

struct RetainedOnNodes {
  std::set<std::string> errors;
  RetentionReport report;  // of rank 3
};

RetainedOnNodes retain_on(const NodeRun& run, std::int64_t step, const Retention& retention) {
  RetainedOnNodes retained;
  std::mutex mutex;
  run_ranks(kRanks, [&](Group& group) {
    try {
      const RetentionReport report =
          retain(run.of(group.rank()), run.at(group, step), retention, group);
      const std::lock_guard lock(mutex);
      if (group.rank() == 3) retained.report = report;
    } catch (const Error& error) {
      const std::string text = error.what();
      const std::lock_guard lock(mutex);
      retained.errors.insert(text);
    }
  });
  return retained;
}

std::set<std::string> directories_in(const Store& store) {
  std::set<std::string> names;
  for (const ObjectInfo& object : store.list())
    names.insert(object.name.substr(0, object.name.find('/')));
  return names;
}

TEST(RunOnNodes, RetentionRemovesOnEveryNode_C13) {
  using ::testing::UnorderedElementsAre;
  for (const CheckpointKind kind : kKindsOnNodes) {
    SCOPED_TRACE(to_string(kind));
    const NodeRun run = run_with(kind, {1, 2, 3, 4, 5}, kind == CheckpointKind::olmo_local);
    // One node lacks a part of each of these two: they take no place.
    lose(run, 0, "step4");
    run.stores[1]->remove("step2" + file_of_last_rank(kind));
    put(*run.stores[1], "step0/rank2.pt", {}, IfExists::fail);  // what a kill left
    const RetainedOnNodes retained = retain_on(run, 5, {.sharded = 2, .link = true});
    EXPECT_THAT(retained.errors, IsEmpty());
    for (const std::string& path : run.paths)
      EXPECT_EQ(std::filesystem::read_symlink(path + "/latest"), "step5");
    EXPECT_THAT(retained.report.removed, UnorderedElementsAre("step4", "step2", "step1", "step0"));
    EXPECT_THAT(retained.report.warnings, IsEmpty());
    for (const auto& store : run.stores)
      EXPECT_THAT(directories_in(*store), UnorderedElementsAre("step5", "step3"));
    EXPECT_THAT(latest_of(run), ElementsAre("step5"));
  }
}

TEST(RunOnNodes, NothingGoesWhileTheNewOneIsNotWholeEverywhere_C12) {
  for (const CheckpointKind kind : kKindsOnNodes) {
    SCOPED_TRACE(to_string(kind));
    const NodeRun run = run_with(kind, {1, 2});
    run.stores[1]->remove("step2" + file_of_last_rank(kind));
    const RetainedOnNodes retained = retain_on(run, 2, {.sharded = 1});
    ASSERT_EQ(retained.errors.size(), 1U);
    EXPECT_THAT(*retained.errors.begin(), HasSubstr(on_this_host(3)));
    EXPECT_THAT(*retained.errors.begin(), HasSubstr("verifying the new checkpoint before older"));
    for (const auto& store : run.stores)
      EXPECT_EQ(directories_in(*store), (std::set<std::string>{"step1", "step2"}));
  }
}

// One node's store fails from some call on, as if its process was killed or its disk was dead.
TEST(RunOnNodes, AFaultAtAnyCallIsOneErrorAndCostsNoNewCheckpoint_C13) {
  struct Case {
    CheckpointKind kind;
    std::size_t failing;
  };
  // Of all cases: which call comes when differs a little, as several threads make them.
  std::atomic<std::size_t> in_between{0};
  std::vector<std::jthread> threads;
  for (const Case& one :
       {Case{CheckpointKind::olmo_local, 0}, Case{CheckpointKind::olmo_local, 1},
        Case{CheckpointKind::olmo_legacy, 0}, Case{CheckpointKind::olmo_legacy, 1}}) {
    threads.emplace_back([one, &in_between] {
      for (std::uint64_t calls = 0;; ++calls) {
        SCOPED_TRACE(std::string(to_string(one.kind)) + " node " + std::to_string(one.failing) +
                     " call " + std::to_string(calls));
        const NodeRun whole_run = run_with(one.kind, {1, 2});
        const std::size_t all = whole_run.stores[one.failing]->list("step1").size();
        NodeRun run = whole_run;
        run.stores[one.failing] = std::make_shared<DyingStore>(whole_run.stores[one.failing], calls,
                                                               DyingStore::Counts::everything);
        const RetainedOnNodes retained = retain_on(run, 2, {.sharded = 1});
        EXPECT_THAT(latest_of(whole_run)[0], "step2");
        std::size_t left = 0;
        for (const auto& store : whole_run.stores) left += store->list("step1").size();
        if (retained.errors.empty()) {
          EXPECT_EQ(left, 0U);
          break;
        }
        EXPECT_EQ(retained.errors.size(), 1U) << *retained.errors.rbegin();
        EXPECT_THAT(*retained.errors.begin(), HasSubstr("io"));
        // On each node it is whole, or there is no checkpoint any more.
        const auto& failed = whole_run.stores[one.failing];
        const std::size_t here = failed->list("step1").size();
        EXPECT_TRUE(here == all || !failed->exists("step1/config.yaml"));
        if (here > 0 && here < all) ++in_between;
        ASSERT_LT(calls, 500U);
      }
    });
  }
  threads.clear();
  EXPECT_GT(in_between, 0U);
}

}  // namespace
}  // namespace tessera
