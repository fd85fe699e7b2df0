// Saves by ranks that do not share the directory: nodes with disks of their own.
#include <gmock/gmock.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "checkpoint/together/testing.h"
#include "conformance/forwarding_store.h"
#include "format/torch/torch_file.h"
#include "storage/forwarding_store.h"
#include "tessera/copy.h"
#include "tessera/restore.h"
#include "tessera/stateful.h"
#include "tessera/verify.h"

namespace tessera {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

// The node of each rank; each has a store of its own.
using Layout = std::vector<int>;
const std::vector<Layout> kLayouts = {{0, 1}, {0, 1, 1}, {0, 0, 1, 1}};

struct Nodes {
  explicit Nodes(const Layout& layout, bool show_late = true) : node_of(layout) {
    for (int node = 0; node <= layout.back(); ++node) {
      const auto store = memory_store("node-" + std::to_string(node));
      stores.push_back(std::make_shared<testing_support::ToldLateStore>(store, show_late));
    }
  }
  [[nodiscard]] int ranks() const { return static_cast<int>(node_of.size()); }
  [[nodiscard]] const std::shared_ptr<Store>& of(int rank) const {
    return stores[static_cast<std::size_t>(node_of[static_cast<std::size_t>(rank)])];
  }

  Layout node_of;
  std::vector<std::shared_ptr<Store>> stores;
};

struct Saving {
  CheckpointKind kind;
  Cut cut;
  bool safetensors = false;
};
const std::vector<Saving> kSavings = {
    {CheckpointKind::olmo_full, Cut::rows},    {CheckpointKind::olmo_full, Cut::flat},
    {CheckpointKind::olmo_full, Cut::whole},   {CheckpointKind::olmo_full, Cut::flat, true},
    {CheckpointKind::olmo_legacy, Cut::rows},  {CheckpointKind::olmo_legacy, Cut::flat},
    {CheckpointKind::olmo_legacy, Cut::whole}, {CheckpointKind::olmo_local, Cut::flat}};

SaveOptions options_of(const Saving& saving) {
  SaveOptions options = options_for(saving.kind);
  options.olmo.safetensors = saving.safetensors;
  return options;
}

void save_on(const Nodes& nodes, const Saving& saving, const SaveOptions& options) {
  run_ranks(nodes.ranks(), [&](Group& group) {
    save(state_of(saving.cut, group.rank(), nodes.ranks()),
         Location(nodes.of(group.rank()), "step4"), options, group);
  });
}

// A rank may take a second and a half to say that it sees no probe, so these wait together.
template <typename Item, typename Work>
void for_each_at_once(const std::vector<Item>& items, const Work& work) {
  std::vector<std::jthread> threads;
  for (const Item& item : items) threads.emplace_back([&] { work(item); });
}

// The files of a directory that all ranks share.
Files files_of_shared(const Saving& saving, int ranks) {
  const auto store = memory_store();
  save_by(ranks, saving.cut, Location(store, "step4"), options_of(saving));
  return files_in(*store, "step4");
}

bool is_file_of(const std::string& name, int rank) {
  const std::string file = "rank" + std::to_string(rank) + ".pt";
  return name == file || name.ends_with("/" + file);
}

// What a node of these ranks has of all files.
Files part_of_node(const Files& all, const Nodes& nodes, int node) {
  Files part;
  for (const auto& [name, bytes] : all) {
    bool is_ranks = false;
    bool is_here = false;
    for (int rank = 0; rank < nodes.ranks(); ++rank) {
      if (!is_file_of(name, rank)) continue;
      is_ranks = true;
      is_here = nodes.node_of[static_cast<std::size_t>(rank)] == node;
    }
    if (is_here || !is_ranks) part.emplace(name, bytes);
  }
  return part;
}

void expect_files_of_nodes(const Nodes& nodes, const Saving& saving) {
  Files shared = files_of_shared(saving, nodes.ranks());
  shared.erase("tessera-state.json");  // has the save's id
  std::vector<Files> found;
  for (const auto& store : nodes.stores) {
    found.push_back(files_in(*store, "step4"));
    EXPECT_EQ(found.back().size(), store->list().size()) << "something lies beside the directory";
  }
  const std::vector<std::byte> digests = found[0].at("tessera-state.json");
  for (std::size_t node = 0; node < found.size(); ++node) {
    if (saving.kind == CheckpointKind::olmo_full && node > 0) {
      EXPECT_TRUE(found[node].empty());
      continue;
    }
    EXPECT_EQ(found[node]["tessera-state.json"], digests);
    found[node].erase("tessera-state.json");
    EXPECT_TRUE(found[node] == part_of_node(shared, nodes, static_cast<int>(node)))
        << "node " << node;
  }
}

TEST(Nodes, HaveTheFilesThatASharedDirectoryHas) {
  struct Case {
    Layout layout;
    Saving saving;
    bool show_late;
  };
  std::vector<Case> cases;
  for (const bool show_late : {false, true}) {
    for (const Layout& layout : kLayouts)
      for (const Saving& saving : kSavings) cases.push_back({layout, saving, show_late});
    // Ranks of one host that see three disks: one after another makes a directory.
    cases.push_back({{0, 1, 2}, {CheckpointKind::olmo_legacy, Cut::flat}, show_late});
  }
  for_each_at_once(cases, [](const Case& one) {
    const Nodes nodes(one.layout, one.show_late);
    save_on(nodes, one.saving, options_of(one.saving));
    SCOPED_TRACE(std::string(to_string(one.saving.kind)) + " cut " +
                 std::to_string(static_cast<int>(one.saving.cut)) + " on " +
                 std::to_string(nodes.ranks()) + " ranks");
    expect_files_of_nodes(nodes, one.saving);
  });
}

// The state of a rank without the trainer's, with zeros in its memory.
Value empty_state_of(Cut cut, int rank, int ranks) {
  Value state = state_of(cut, rank, ranks);
  state.erase("train");
  for (const Leaf& leaf : flatten(state)) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    for (const Piece& piece : leaf.value.as_tensor().pieces)
      std::memset(piece.storage->data, 0, piece.storage->size);
  }
  return state;
}

struct Restored {
  Value tree;
  bool is_own = false;
};

Restored restore_own(const std::shared_ptr<Store>& store, Cut cut, Group& group) {
  Restored restored{empty_state_of(cut, group.rank(), group.size())};
  const auto where = std::make_shared<SubStore>(store, "step4");
  auto checkpoint = GroupCheckpoint::open(where, restored.tree.at("model"), {}, group);
  LiveNames live;
  for (const Parameter& parameter : kParameters) live.names.emplace_back(parameter.name);
  checkpoint.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
  LoadOptions options;
  options.extra = OnDifference::report;
  options.missing = OnDifference::report;
  checkpoint.load(restored.tree, options);
  restored.is_own = checkpoint.is_own();
  return restored;
}

TEST(Nodes, RestoreFromTheirOwnDirectories_O61_O73) {
  struct Case {
    Layout layout;
    Saving saving;
  };
  std::vector<Case> cases;
  for (const Layout& layout : kLayouts) {
    cases.push_back({layout, {CheckpointKind::olmo_local, Cut::flat}});
    cases.push_back({layout, {CheckpointKind::olmo_legacy, Cut::rows}});
    // Rows, of which the ranks of other nodes have some: they tell one another.
    cases.push_back({layout, {CheckpointKind::olmo_legacy, Cut::flat}});
  }
  for_each_at_once(cases, [](const Case& one) {
    const Nodes nodes(one.layout);
    save_on(nodes, one.saving, options_of(one.saving));
    run_ranks(nodes.ranks(), [&](Group& group) {
      const auto& store = nodes.of(group.rank());
      const Restored restored = restore_own(store, one.saving.cut, group);
      const bool is_told =
          one.saving.kind == CheckpointKind::olmo_legacy && one.saving.cut == Cut::flat;
      EXPECT_EQ(restored.is_own, !is_told);
      // The digests that each node has prove what was restored.
      Value model = Value::dict({{"model", restored.tree.at("model")}});
      const StateDigests saved = saved_digests(SubStore(store, "step4"));
      EXPECT_EQ(saved.size(), 3 * kParameters.size());
      if (is_told) model.set_item("optim", restored.tree.at("optim"));
      for (const auto& [name, digest] : state_digests(model, group))
        EXPECT_EQ(saved.at(name), digest) << name;
      const auto state = trainer_state(std::make_shared<SubStore>(store, "step4"), {}, group);
      EXPECT_EQ(state.state->at("rank").as_int(), group.rank());
    });
  });
}

// What each node has comes together in another store, from which any ranks restore.
TEST(Nodes, AnUploadBringsTheirDirectoriesTogether_O18) {
  const std::vector<Saving> savings = {{CheckpointKind::olmo_local, Cut::flat},
                                       {CheckpointKind::olmo_legacy, Cut::flat}};
  for_each_at_once(savings, [](const Saving& saving) {
    const Nodes nodes({0, 0, 1, 1});
    save_on(nodes, saving, options_of(saving));
    const auto remote = memory_store("remote");
    run_ranks(nodes.ranks(), [&](Group& group) {
      upload(Location(nodes.of(group.rank()), "step4"), Location(remote, "step4"), {}, group);
    });
    Files shared = files_of_shared(saving, nodes.ranks());
    Files found = files_in(*remote, "step4");
    for (Files* files : {&shared, &found}) EXPECT_EQ(files->erase("tessera-state.json"), 1U);
    EXPECT_TRUE(found == shared);
    expect_state(Checkpoint::open(std::make_shared<SubStore>(remote, "step4")));
  });
}

// A file whose rank holds nothing of a parameter any more, on the node that alone has it.
void empty_shards(Store& store, const std::string& file, const std::string& parameter) {
  Checkpoint held;
  held.root = torch_file::read(store.open(file));
  held.leaves = leaves_of(*held.root);
  Value tree = held.load();
  Value shards = tree.at("model").at(parameter).as_object().arguments.items()[3].items()[0];
  shards.items().clear();
  put(store, file, torch_file::write(tree, "rank1"), IfExists::replace);
}

TEST(Nodes, AreToldWhatNoneOfThemHolds) {
  const Nodes nodes({0, 1});
  const Saving saving{CheckpointKind::olmo_legacy, Cut::flat};
  save_on(nodes, saving, options_of(saving));
  empty_shards(*nodes.stores[1], "step4/rank1.pt", "transformer.blocks.1.w");
  std::mutex mutex;
  std::set<std::string> errors;
  run_ranks(2, [&](Group& group) {
    try {
      (void)restore_own(nodes.of(group.rank()), saving.cut, group);
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      errors.emplace(error.what());
    }
  });
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_THAT(*errors.begin(), HasSubstr("no rank's own files hold a part"));
  EXPECT_THAT(*errors.begin(), HasSubstr("model.transformer.blocks.1.w"));
}

std::string message_of(const std::function<void()>& work, ErrorCode code) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST(Nodes, OtherWorldsAreToldWhichFilesAreMissing) {
  const std::vector<Saving> savings = {{CheckpointKind::olmo_local, Cut::flat},
                                       {CheckpointKind::olmo_legacy, Cut::rows}};
  for_each_at_once(savings, [](const Saving& saving) {
    const Nodes nodes({0, 0, 1, 1});
    save_on(nodes, saving, options_of(saving));
    const std::string folder = saving.kind == CheckpointKind::olmo_local ? "model/" : "";
    for (const int ranks : {1, 2, 3}) {
      const std::string said = message_of(
          [&] {
            run_ranks(ranks, [&](Group& group) {
              (void)restore_own(nodes.of(group.rank()), saving.cut, group);
            });
          },
          ErrorCode::incomplete);
      EXPECT_THAT(said, HasSubstr(folder + "rank2.pt"));
      EXPECT_THAT(said, HasSubstr(folder + "rank3.pt"));
    }
    // The same number of ranks, whose nodes have changed places.
    const std::string said = message_of(
        [&] {
          run_ranks(4, [&](Group& group) {
            (void)restore_own(nodes.of(3 - group.rank()), saving.cut, group);
          });
        },
        ErrorCode::incomplete);
    EXPECT_THAT(said, HasSubstr(folder + "rank0.pt"));
    EXPECT_THAT(said, HasSubstr(folder + "rank1.pt"));
  });
}

TEST(Nodes, CannotHaveATorchNewCheckpoint_F25) {
  const Nodes nodes({0, 0, 1, 1});
  const Saving saving{CheckpointKind::olmo_torch_new, Cut::flat};
  const std::string said =
      message_of([&] { save_on(nodes, saving, options_of(saving)); }, ErrorCode::incomplete);
  EXPECT_THAT(said, HasSubstr("2 of 4 ranks do not see what rank 0 on"));
  EXPECT_THAT(said, HasSubstr("(rank 2 on "));
  for (const auto& store : nodes.stores) EXPECT_TRUE(store->list().empty());
}

// Does not show rank 0's probe before it was asked for it some times.
class LateStore final : public testing_support::ForwardingStore {
 public:
  LateStore(std::shared_ptr<Store> inner, int refusals)
      : ForwardingStore(std::move(inner)), refusals_(refusals) {}
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    if (name.ends_with(".probe") && refusals_-- > 0) throw Error(ErrorCode::not_found, "not yet");
    return inner().open(name);
  }

 private:
  mutable std::atomic<int> refusals_;
};

// Saves in place of what is there by two ranks. Rank 1 looks seven times for rank 0's probe, and
// again later; rank 0 looks once for rank 1's.
void save_late(const Saving& saving, const std::shared_ptr<Store>& shared, int missed_by_first) {
  run_ranks(2, [&](Group& group) {
    SaveOptions options = options_of(saving);
    options.overwrite = true;
    const auto late = std::make_shared<LateStore>(shared, group.rank() > 0 ? 13 : missed_by_first);
    save(state_of(saving.cut, group.rank(), 2), Location(late, "step4"), options, group);
  });
}

// F24, F25: ranks of a disk that all share wait for what they see late. If neither sees what the
// other one has put there, each takes it for its own: publishing both directories would lose one.
TEST(Nodes, OneDirectoryIsNotPublishedTwice_F24) {
  for_each_at_once(kSavings, [](const Saving& saving) {
    const auto shared = memory_store();
    save_by(2, saving.cut, Location(shared, "step4"), options_of(saving));
    Files before = files_in(*shared, "step4");
    for (const int missed_by_first : {0, 1}) {
      const auto save_again = [&] { save_late(saving, shared, missed_by_first); };
      if (missed_by_first == 0 || saving.kind == CheckpointKind::olmo_full) {
        save_again();
        before["tessera-state.json"] = files_in(*shared, "step4").at("tessera-state.json");
      } else {
        EXPECT_THAT(message_of(save_again, ErrorCode::conflict), HasSubstr("was not seen here"));
      }
      EXPECT_TRUE(files_in(*shared, "step4") == before);
      EXPECT_EQ(shared->list().size(), before.size());
    }
  });
}

// On disks: looking for what is on another one leaves nothing, neither does a refused save.
TEST(Nodes, NothingIsLeftOnTheirDisks) {
  std::vector<std::pair<CheckpointKind, bool>> cases;
  for (const CheckpointKind kind : {CheckpointKind::olmo_full, CheckpointKind::olmo_legacy,
                                    CheckpointKind::olmo_local, CheckpointKind::olmo_torch_new})
    for (const bool shows_late : {false, true}) cases.emplace_back(kind, shows_late);
  const std::string root = temporary_directory();
  for_each_at_once(cases, [&](const auto& one) {
    const CheckpointKind kind = one.first;
    const bool shows_late = one.second;
    const std::string name = std::string(to_string(kind)) + (shows_late ? "-late-" : "-");
    const std::string disks[] = {root + "/" + name + "0", root + "/" + name + "1"};
    const auto save_there = [&] {
      run_ranks(3, [&](Group& group) {
        const auto disk = std::make_shared<testing_support::ToldLateStore>(
            posix_store(disks[group.rank() / 2]), shows_late);
        save(state_of(Cut::flat, group.rank(), 3), Location(disk, "step4"), options_for(kind),
             group);
      });
    };
    const bool is_refused = kind == CheckpointKind::olmo_torch_new;
    if (is_refused) {
      EXPECT_EQ(code_of(save_there), ErrorCode::incomplete);
    } else {
      save_there();
    }
    for (int disk = 0; disk < 2; ++disk) {
      const bool has_one = !is_refused && (disk == 0 || kind != CheckpointKind::olmo_full);
      std::vector<std::string> found;
      if (std::filesystem::exists(disks[disk])) {
        for (const auto& entry : std::filesystem::directory_iterator(disks[disk]))
          found.push_back(entry.path().filename());
      }
      EXPECT_EQ(found, std::vector<std::string>(has_one ? 1 : 0, "step4")) << disks[disk];
    }
  });
}

// Several rounds of messages.
TEST(Nodes, LargeTensorsTravelInParts) {
  const Nodes nodes({0, 1});
  const Shape shape{6, 1 << 20};  // 24 MiB
  run_ranks(2, [&](Group& group) {
    const Value model =
        Value::dict({{"w", part_of(shape, {.parts = 2}, group.rank(), 0, DType::int32)}});
    SaveOptions options = options_for(CheckpointKind::olmo_full);
    std::mutex mutex;  // of what the hook has told, in bytes
    std::vector<std::uint64_t> told;
    options.progress = [&](const Progress& progress) {
      const std::lock_guard lock(mutex);
      EXPECT_EQ(progress.total, 12U << 20);
      told.push_back(progress.done);
    };
    save(Value::dict({{"model", model}}), Location(nodes.of(group.rank()), "step4"), options,
         group);
    EXPECT_TRUE(std::ranges::is_sorted(told));
    EXPECT_EQ(told.back(), 12U << 20);
  });
  const auto where = std::make_shared<SubStore>(nodes.stores[0], "step4");
  const Checkpoint checkpoint = Checkpoint::open(where);
  std::vector<std::int32_t> values(static_cast<std::size_t>(numel(shape)));
  checkpoint.read("model.w", TensorView::of(values.data(), DType::int32, shape));
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(values[i], static_cast<std::int32_t>(i));
}

// What ranks on two nodes say of a save of which one node's store fails from some call on.
struct Outcome {
  std::vector<std::string> errors;
  std::vector<Files> found;  // by node
  std::size_t objects = 0;   // in both stores
};

Outcome save_with_fault(const Saving& saving, int failing, std::uint64_t calls, Files& before) {
  const Nodes nodes({0, 1});
  SaveOptions options = options_of(saving);
  options.overwrite = true;
  // An older save, as if by the same nodes.
  for (int node = 0; node < 2; ++node) {
    if (saving.kind == CheckpointKind::olmo_full && node > 0) continue;
    put(*nodes.stores[static_cast<std::size_t>(node)], "step4/config.yaml", {}, IfExists::fail);
    put(*nodes.stores[static_cast<std::size_t>(node)], "step4/rank0.pt", {}, IfExists::fail);
  }
  before = files_in(*nodes.stores[0], "step4");
  const auto store = std::make_shared<FailingStore>(
      nodes.of(failing), std::make_shared<Fault>(ErrorCode::out_of_space, calls));
  Outcome outcome;
  std::mutex mutex;
  run_ranks(2, [&](Group& group) {
    try {
      const bool fails = group.rank() == failing;
      save(state_of(saving.cut, group.rank(), 2),
           Location(fails ? store : nodes.of(group.rank()), "step4"), options, group);
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      outcome.errors.emplace_back(error.what());
    }
  });
  for (const auto& one : nodes.stores) {
    outcome.found.push_back(files_in(*one, "step4"));
    outcome.objects += one->list().size();
  }
  return outcome;
}

// F06 to F17: a full or dead disk of one node. Before the first directory is published every node
// keeps what it had; after that each has one or the other, whole.
TEST(Nodes, AFaultAtAnyCallIsOneErrorAndKeepsWhatEachNodeHas_F06_R06) {
  struct Case {
    Saving saving;
    int failing;
    std::uint64_t calls;
  };
  constexpr std::uint64_t kMost = 90;  // more than a save makes
  std::vector<Case> cases;
  for (const Saving& saving : {Saving{CheckpointKind::olmo_full, Cut::flat},
                               Saving{CheckpointKind::olmo_legacy, Cut::flat},
                               Saving{CheckpointKind::olmo_local, Cut::flat}}) {
    for (const int failing : {0, 1}) {
      if (saving.kind == CheckpointKind::olmo_full && failing == 1) continue;  // writes nothing
      for (std::uint64_t calls = 0; calls < kMost; ++calls)
        cases.push_back({saving, failing, calls});
    }
  }
  std::atomic<int> in_between = 0;
  std::atomic<int> succeeded = 0;
  for_each_at_once(cases, [&](const Case& one) {
    SCOPED_TRACE(std::string(to_string(one.saving.kind)) + " rank " + std::to_string(one.failing) +
                 " call " + std::to_string(one.calls));
    Files before;
    const Outcome outcome = save_with_fault(one.saving, one.failing, one.calls, before);
    std::size_t objects = 0;
    int published = 0;
    for (const Files& files : outcome.found) {
      objects += files.size();
      if (!files.contains("tessera-state.json")) {
        EXPECT_TRUE(files.empty() || files == before);
      } else {
        ++published;
        EXPECT_FALSE(files.at("config.yaml").empty());
      }
    }
    EXPECT_EQ(outcome.objects, objects) << "something is left beside the directories";
    if (outcome.errors.empty()) {
      ++succeeded;
      return;
    }
    EXPECT_LT(one.calls, kMost - 1) << "there may be more calls that could fail";
    ASSERT_EQ(outcome.errors.size(), 2U) << outcome.errors.front();
    EXPECT_EQ(outcome.errors[0], outcome.errors[1]);
    if (published > 0) {
      ++in_between;
      EXPECT_THAT(outcome.errors[0], HasSubstr("those of others may be"));
    }
  });
  EXPECT_GE(in_between, 4);  // one for each node and kind
  EXPECT_GE(succeeded, 5);
}

// A node that could not publish has its old directory, of the same step, whose files hold the same.
// Nobody takes that for one save; the next one makes them one again.
TEST(Nodes, TheNextSaveRepairsWhatOneNodeDidNotPublish) {
  const std::vector<Saving> savings = {{CheckpointKind::olmo_local, Cut::flat},
                                       {CheckpointKind::olmo_legacy, Cut::rows}};
  for_each_at_once(savings, [](const Saving& saving) {
    SaveOptions options = options_of(saving);
    options.overwrite = true;
    const std::vector<Nodes> saved{Nodes({0, 1}), Nodes({0, 1})};
    for_each_at_once(saved, [&](const Nodes& nodes) { save_on(nodes, saving, options); });
    Nodes mixed = saved[1];
    mixed.stores[0] = saved[0].stores[0];
    const auto restore_all = [&] {
      run_ranks(2, [&](Group& group) {
        EXPECT_TRUE(restore_own(mixed.of(group.rank()), saving.cut, group).is_own);
      });
    };
    EXPECT_THAT(message_of(restore_all, ErrorCode::mismatch), HasSubstr("not of one save"));
    save_on(mixed, saving, options);
    restore_all();
  });
}

}  // namespace
}  // namespace tessera
