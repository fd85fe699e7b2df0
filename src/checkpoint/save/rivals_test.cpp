// Two saves into one place of a store in which nobody can keep the other one out.
#include <gtest/gtest.h>

#include <atomic>

#include "checkpoint/save/place.h"
#include "checkpoint/test_support.h"
#include "storage/forwarding_store.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

Value numbered(int number) {
  return Value::dict(
      {{"n", number}, {"w", Value(counting({6}, chunk({6}, 0, 1), static_cast<float>(number)))}});
}

// The number of the checkpoint that is there; it is whole.
std::int64_t number_in(const std::shared_ptr<Store>& store) {
  Value tree = numbered(0);
  load(tree, store);
  return tree.at("n").as_int();
}

class Rivals : public testing::TestWithParam<const char*> {
 protected:
  // Saves `late`, during whose phase GetParam() a rival saves `early`.
  ErrorCode race(bool overwrite) {
    SaveOptions options;
    options.overwrite = overwrite;
    bool is_done = false;
    SaveOptions disturbed = options;
    disturbed.events = [&](const Event& event) {
      if (event.phase != GetParam() || is_done) return;
      is_done = true;
      save(numbered(2), store_, options);
    };
    return code_of([&] { save(numbered(3), store_, disturbed); });
  }

  const std::shared_ptr<Store> store_ = memory_store();
};

TEST_P(Rivals, OfTwoFirstSavesOneIsThere_C01_O11) {
  EXPECT_EQ(race(false), ErrorCode::already_exists);
  EXPECT_EQ(number_in(store_), 2);
}

TEST_P(Rivals, WhoPlannedOnAReplacedCheckpointHasLost_C01_O11) {
  save(numbered(1), store_);
  EXPECT_EQ(race(true), ErrorCode::conflict);
  EXPECT_EQ(number_in(store_), 2);
}

// The loser's files are not the winner's to remove before it has won, and go then.
TEST_P(Rivals, NothingPilesUp) {
  SaveOptions overwrite;
  overwrite.overwrite = true;
  save(numbered(1), store_);
  save(numbered(2), store_, overwrite);
  const std::size_t objects = store_->list().size();
  (void)race(true);
  for (int i = 0; i < 3; ++i) save(numbered(4 + i), store_, overwrite);
  EXPECT_EQ(store_->list().size(), objects);
  EXPECT_EQ(number_in(store_), 6);
}

// Lists `.metadata`, and says that there is none when it is asked for it.
class Forgetful final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] bool exists(std::string_view name) const override {
    return name != ".metadata" && ForwardingStore::exists(name);
  }
  // Whoever reads what the listing has told of gets it.
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    if (name == ".metadata" && !was_asked_.exchange(true))
      throw Error(ErrorCode::not_found, "there is no such object");
    return ForwardingStore::open(name);
  }

 private:
  mutable std::atomic<bool> was_asked_ = false;
};

TEST(Leftovers, WhatIsListedIsThereWhateverElseAStoreSays_O17) {
  const auto store = memory_store();
  save(numbered(1), store);
  const Forgetful forgetful(store);
  EXPECT_TRUE(leftovers_in(forgetful, present_in(forgetful)).empty());
}

INSTANTIATE_TEST_SUITE_P(Phases, Rivals, testing::Values("plan", "write"));

}  // namespace
}  // namespace tessera
