// Ranks that see late, or never, what rank 0 has opened: loads of every kind (fault-rows F24).
#include "five_kinds_testing.h"

#include <chrono>
#include <optional>
#include <thread>

#include "conformance/forwarding_store.h"
#include "conformance/short_patience.h"
#include "tessera/restore.h"
#include "tessera/stateful.h"

namespace tessera {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr std::chrono::milliseconds kLate{120};

// Shows nothing for a while, from the first time that it is asked: as a network file system whose
// client remembers that there is nothing.
class BlindStore final : public testing_support::ForwardingStore {
 public:
  BlindStore(std::shared_ptr<Store> inner, std::optional<std::chrono::milliseconds> late)
      : ForwardingStore(std::move(inner)), late_(late) {}

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return sees() ? ForwardingStore::list(prefix) : std::vector<ObjectInfo>();
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return sees() ? ForwardingStore::list_level(prefix) : std::vector<ObjectInfo>();
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    return sees() && ForwardingStore::exists(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view object) const override {
    if (!sees()) throw Error(ErrorCode::not_found, "not yet").at_path(std::string(object));
    return ForwardingStore::open(object);
  }

 private:
  [[nodiscard]] bool sees() const {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (!asked_) asked_ = now;
    return late_ && now - *asked_ > *late_;
  }

  const std::optional<std::chrono::milliseconds> late_;  // none: it never sees anything
  mutable std::mutex mutex_;
  mutable std::optional<std::chrono::steady_clock::time_point> asked_;  // guarded by mutex_
};

// Rank 0 does not read all of it when it opens the checkpoint: what it has read, it tells.
const NamedShapes kShapes = {{"a.w", {501, 301}}, {"b.bias", {100'003}}};

void save_large(CheckpointKind kind, const std::string& path) {
  run_ranks(2, [&](Group& group) {
    (void)save(training_state(group.rank(), 2, 7, kShapes), path,
               options_for_kind(kind, false, kShapes), group);
  });
}

Value model_of_rank(int rank) {
  return Value::dict({{"model", training_state(rank, 2, 3, kShapes).at("model")}});
}

bool is_loaded(const Value& tree, int number) {
  for (const Leaf& leaf : leaves_of(tree)) {
    for (const Piece& piece : leaf.value.as_tensor().pieces) {
      const auto* begin = reinterpret_cast<const float*>(piece.storage->data);
      if (std::count(begin, begin + numel(piece.slice), static_cast<float>(number)) !=
          numel(piece.slice))
        return false;
    }
  }
  return true;
}

// Loads by the ranks that saved it, and so from their own files where that is possible.
void load_own(Value& tree, const Location& where, Group& group) {
  auto found = GroupCheckpoint::open(where, tree.at("model"), {}, group);
  (void)found.load(tree);
}

Location seen_by(int rank, const std::string& path, std::optional<std::chrono::milliseconds> late) {
  const auto store = posix_store(path);
  return rank == 0 ? Location(store) : Location(std::make_shared<BlindStore>(store, late));
}

TEST(FiveKinds, F24_ALoadWaitsForACheckpointThatARankSeesLate) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_large(kind, path);
    for (const bool own : {false, true}) {
      const auto begin = std::chrono::steady_clock::now();
      run_ranks(2, [&](Group& group) {
        Value tree = model_of_rank(group.rank());
        const Location where = seen_by(group.rank(), path, kLate);
        own ? load_own(tree, where, group) : void(load(tree, where, {}, group));
        EXPECT_TRUE(is_loaded(tree, 7));
      });
      EXPECT_GE(std::chrono::steady_clock::now() - begin, kLate);
    }
  });
}

TEST(FiveKinds, F24_ARankWaitsForItsTrainersState) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    if (kind == CheckpointKind::dcp) return;  // it has none
    save_by(2, kind, path, 7);
    run_ranks(2, [&](Group& group) {
      const auto state = trainer_state(seen_by(group.rank(), path, kLate), {}, group).state;
      ASSERT_TRUE(state.has_value());
      EXPECT_EQ(state->at("global_step").as_int(), 7);
    });
  });
}

TEST(FiveKinds, F24_ALoadWaitsForADirectoryThatARankSeesLate) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_large(kind, path);
    const std::string late = parent_of(path) + "/late";
    std::jthread appears([&] {
      std::this_thread::sleep_for(kLate);
      fs::create_directory_symlink(path, late);
    });
    run_ranks(2, [&](Group& group) {
      Value tree = model_of_rank(group.rank());
      (void)load(tree, group.rank() == 0 ? path : late, {}, group);
      EXPECT_TRUE(is_loaded(tree, 7));
    });
  });
}

TEST(FiveKinds, F24_WhatNeverAppearsIsTheErrorOfAll) {
  const testing_support::ShortPatience patience;
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_large(kind, path);
    const std::string nowhere = parent_of(path) + "/nowhere";
    for (const bool is_path : {false, true}) {
      const Error error = one_error(errors_of([&](Group& group) {
        Value tree = model_of_rank(group.rank());
        Location where = seen_by(group.rank(), path, {});
        if (is_path) where = group.rank() == 0 ? path : nowhere;
        try {
          (void)load(tree, where, {}, group);
        } catch (const Error&) {
          if (is_path) {
            EXPECT_TRUE(is_loaded(tree, 3));
          }
          throw;
        }
      }));
      EXPECT_EQ(error.code(), ErrorCode::incomplete) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("rank 1: incomplete: rank 0 has opened"));
      EXPECT_THAT(error.what(), HasSubstr(is_path ? "nowhere" : "step4/"));
    }
  });
}

// No rank waits for what no rank sees.
TEST(FiveKinds, F24_AFileThatIsNowhereIsAnErrorAtOnce) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_large(kind, path);
    fs::remove(kind == CheckpointKind::olmo_local ? path + "/model/rank1.pt"
                                                  : file_of_rank_one(kind, path));
    for (const bool own : {false, true}) {
      const auto begin = std::chrono::steady_clock::now();
      const Error error = one_error(errors_of([&](Group& group) {
        Value tree = model_of_rank(group.rank());
        own ? load_own(tree, path, group) : void(load(tree, path, {}, group));
      }));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
      EXPECT_TRUE(error.code() == ErrorCode::incomplete || error.code() == ErrorCode::not_found)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace tessera
