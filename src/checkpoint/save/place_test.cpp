#include "checkpoint/save/place.h"

#include <atomic>
#include <filesystem>

#include <gmock/gmock.h>

#include "checkpoint/save/messages.h"
#include "checkpoint/test_support.h"
#include "conformance/forwarding_store.h"
#include "conformance/short_patience.h"
#include "layout/boxes.h"

namespace tessera {

// Ranks that write into different places, or that see late what others wrote.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::ForwardingStore;

// A third of the rows of a tensor.
Value third_of(int rank) {
  const Shape shape{6, 2};
  return Value::dict({{"w", counting(shape, chunk(shape, rank, 3), 1)}});
}

// The names of all data files that a save begins to write. It may show late what others make.
class Recording final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] bool may_show_late() const override { return true; }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    if (name.ends_with(".distcp")) ++data_files_;
    return ForwardingStore::create(name, if_exists, size_hint);
  }
  [[nodiscard]] int data_files() const { return data_files_; }

 private:
  std::atomic<int> data_files_ = 0;
};

// F25, R06: on disks that were taken for one shared, every rank wrote and got success. Rank 3 has
// nothing to write: it noticed nothing.
TEST(Probe, DirectoriesThatOnlyLookAlikeAreRefusedBeforeAnythingIsWritten) {
  const std::string root = temporary_directory();
  std::atomic<int> refused = 0;
  run_ranks(4, [&](Group& group) {
    const bool is_shared = group.rank() < 2;
    const std::string mine = root + (is_shared ? "/shared" : "/own");
    const auto store = std::make_shared<Recording>(posix_store(mine));
    try {
      save(group.rank() < 3 ? third_of(group.rank()) : Value::dict({}), store, group);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::incomplete);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("2 of 4 ranks do not see what rank 0 on"),
                                      HasSubstr("(rank 2 on "), HasSubstr(", rank 3 on ")));
      ++refused;
    }
    EXPECT_EQ(store->data_files(), 0);
  });
  EXPECT_EQ(refused, 4);
  EXPECT_FALSE(std::filesystem::exists(root + "/shared"));
  EXPECT_TRUE(std::filesystem::is_empty(root + "/own"));
}

// Counts how often somebody looks for a probe. What others make is there at once.
class Watched final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] bool may_show_late() const override { return false; }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    if (name.ends_with(".probe")) ++looks_;
    return ForwardingStore::open(name);
  }
  [[nodiscard]] int looks() const { return looks_; }

 private:
  mutable std::atomic<int> looks_ = 0;
};

// F25: on disks of their own, ranks waited a second and a half for what could not appear.
TEST(Probe, WhereNothingIsSeenLateARankLooksOnce_F25) {
  run_ranks(3, [](Group& group) {
    const auto disk = memory_store();
    const auto own = std::make_shared<Watched>(disk);
    EXPECT_EQ(code_of([&] { save(third_of(group.rank()), own, group); }), ErrorCode::incomplete);
    EXPECT_EQ(own->looks(), 1);  // rank 0 for its own, which may have been deleted
    EXPECT_TRUE(disk->list().empty());
  });
}

TEST(Probe, OfRanksThatDoNotSeeItSixteenAreNamedAndAllAreCounted) {
  Unseeing all;
  for (int rank = 0; rank < 20; ++rank) {
    const Unseeing one{{{rank, "h" + std::to_string(rank)}}, 0};
    all.add(from_message<Unseeing>(to_message(one)));
  }
  try {
    require_seen_by_all(all, 30, *memory_store());
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("20 of 30 ranks"), HasSubstr("rank 15 on h15"),
                                    HasSubstr(" and 4 more)")));
  }
}

// Does not show an object of another node before it was asked for it some times, as a network file
// system may. It lists none of them.
class Late final : public ForwardingStore {
 public:
  Late(std::shared_ptr<Store> inner, std::string ending, int refusals)
      : ForwardingStore(std::move(inner)), ending_(std::move(ending)), refusals_(refusals) {}
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    std::vector<ObjectInfo> listed = ForwardingStore::list_level(prefix);
    std::erase_if(listed, [&](const ObjectInfo& object) { return is_late(object.name); });
    return listed;
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    if (is_late(name) && refusals_-- > 0) throw Error(ErrorCode::not_found, "not yet");
    return ForwardingStore::open(name);
  }

 private:
  [[nodiscard]] bool is_late(std::string_view name) const { return name.ends_with(ending_); }
  std::string ending_;
  mutable std::atomic<int> refusals_;
};

// F24: what a node did not see yet was taken for missing.
TEST(Probe, APlaceThatAppearsLateIsWaitedFor) {
  // Seven looks show that a rank sees it late, and then it waits.
  for (const int refusals : {1, 5, 14}) {
    const auto shared = memory_store();
    run_ranks(3, [&](Group& group) {
      const auto late = std::make_shared<Late>(shared, ".probe", group.rank() == 0 ? 0 : refusals);
      EXPECT_NO_THROW(save(third_of(group.rank()), late, group)) << refusals;
    });
    EXPECT_EQ(shared->list().size(), 5U);  // data of three ranks, .metadata and its side file
  }
}

// Rank 0 sees what the others put there: they look at one place, so they do not give up soon.
TEST(Probe, APlaceThatNeverAppearsIsNotWaitedForForever) {
  const testing_support::ShortPatience patience;
  const auto shared = memory_store();
  std::atomic<int> refused = 0;
  run_ranks(3, [&](Group& group) {
    const auto late = std::make_shared<Late>(shared, ".probe", group.rank() == 2 ? 1'000'000 : 0);
    try {
      save(third_of(group.rank()), late, group);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::incomplete);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("1 of 3 ranks do not see"), HasSubstr("(rank 2 on "),
                        HasSubstr("waiting for a directory to appear")));
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
  EXPECT_TRUE(shared->list().empty());
}

TEST(Probe, FilesThatAppearLateAreWaitedFor) {
  for (const int refusals : {0, 1, 7}) {
    const auto shared = memory_store();
    run_ranks(3, [&](Group& group) {
      const auto late = std::make_shared<Late>(shared, ".distcp", group.rank() == 0 ? refusals : 0);
      EXPECT_NO_THROW(save(third_of(group.rank()), late, group)) << refusals;
    });
    EXPECT_EQ(Checkpoint::open(shared).files.size(), 4U);
  }
}

// Writes data elsewhere, while it sees what the others see.
class Elsewhere final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return own_->create(name, if_exists, size_hint);
  }
  void remove(std::string_view name) override { own_->remove(name); }
  [[nodiscard]] bool is_empty() const { return own_->list().empty(); }

 private:
  std::shared_ptr<Store> own_ = memory_store();
};

// The check before the commit, for whatever the probe does not show.
TEST(Probe, FilesThatRankZeroDoesNotSeeAreRefusedBeforeTheCommit) {
  const testing_support::ShortPatience patience;
  const auto shared = memory_store();
  std::atomic<int> refused = 0;
  run_ranks(3, [&](Group& group) {
    const auto own = std::make_shared<Elsewhere>(shared);
    try {
      save(third_of(group.rank()), group.rank() == 0 ? shared : own, group);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::incomplete);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("does not see 2 of the data files"),
                                      HasSubstr("__1_0_"), HasSubstr("of rank 2 on ")));
      ++refused;
    }
    EXPECT_TRUE(own->is_empty());
  });
  EXPECT_EQ(refused, 3);
  EXPECT_TRUE(shared->list().empty());
}

// A save that was killed left its probe: the next one removes it, whether there is a checkpoint or
// not. So does the save itself, whatever ends it.
TEST(Probe, NoneIsLeft) {
  const auto store = memory_store();
  const std::string left = "tessera-0123456789ab.probe";
  for (const bool overwrite : {false, true}) {
    put(*store, left, {}, IfExists::fail);
    save(Value::dict({{"n", 1}}), store, {.overwrite = overwrite, .single_writer = true});
    EXPECT_FALSE(store->exists(left)) << overwrite;
  }
  run_ranks(2, [&](Group& group) {
    const Value tree = Value::dict({{"n", group.rank()}});
    EXPECT_THROW(save(tree, store, {.overwrite = true}, group), Error);
    EXPECT_THROW(save(tree, store, {.overwrite = true, .threads = 0}, group), Error);
  });
  for (const ObjectInfo& object : store->list()) EXPECT_FALSE(object.name.ends_with(".probe"));
}

// It would look for 90 seconds.
TEST(Probe, NobodyLooksForTheFilesOfARankThatIsLost) {
  const auto store = posix_store(temporary_directory());
  Reports reports;
  reports.ranks.push_back({.rank = 1, .host = "elsewhere", .files = {{}}});
  const auto lost = [] { throw Error(ErrorCode::peer_failed, "rank 1 is gone"); };
  EXPECT_EQ(code_of([&] {
              require_in_store(reports, {*store, store->list_level()}, "0123456789ab", {{}, lost});
            }),
            ErrorCode::peer_failed);
}

}  // namespace
}  // namespace tessera
