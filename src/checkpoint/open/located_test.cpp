#include "checkpoint/open/located.h"

#include <gtest/gtest.h>

#include "checkpoint/test_support.h"
#include "conformance/errors.h"
#include "storage/forwarding_store.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// Counts the requests that a store far away would answer.
class AskedStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    ++asked;
    return ForwardingStore::list(prefix);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    ++asked;
    return ForwardingStore::list_level(prefix);
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    ++asked;
    return ForwardingStore::exists(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    ++asked;
    return ForwardingStore::open(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open_listed(const ObjectInfo& object) const override {
    return ForwardingStore::open(object.name);  // a bucket needs no request for it
  }

  mutable int asked = 0;
};

class Snapshot : public testing::Test {
 protected:
  Snapshot() { put_text("a", "one"), put_text("d/b", "two"); }

  void put_text(const std::string& name, const std::string& text) {
    put(*memory_, name, std::as_bytes(std::span(text)), IfExists::replace);
  }
  static std::string text_in(const Store& store, const std::string& name) {
    const auto bytes = read_all(*store.open(name), 100);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  const std::shared_ptr<Store> memory_ = memory_store();
  const std::shared_ptr<AskedStore> asked_ = std::make_shared<AskedStore>(memory_);
};

TEST_F(Snapshot, ALevelIsListedOnceForAllItsNames) {
  const auto store = snapshot_store(asked_, true);
  for (int again = 0; again < 3; ++again) {
    EXPECT_TRUE(store->exists("a"));
    EXPECT_FALSE(store->exists("none"));
    EXPECT_EQ(text_in(*store, "a"), "one");
    EXPECT_EQ(store->list_level().size(), 1U);
  }
  EXPECT_EQ(asked_->asked, 1);
  EXPECT_EQ(text_in(*store, "d/b"), "two");
  EXPECT_EQ(asked_->asked, 2);
  EXPECT_EQ(store->list().size(), 2U);
  EXPECT_EQ(store->list().size(), 2U);
  EXPECT_EQ(asked_->asked, 3);
}

TEST_F(Snapshot, WithoutListingsAnObjectIsOpenedOnce) {
  const auto store = snapshot_store(asked_, false);
  for (int again = 0; again < 3; ++again) {
    EXPECT_TRUE(store->exists("a"));
    EXPECT_EQ(text_in(*store, "a"), "one");
    EXPECT_FALSE(store->exists("none"));
  }
  EXPECT_EQ(asked_->asked, 2);
}

TEST_F(Snapshot, StaysAsItWas) {
  const auto store = snapshot_store(asked_, true);
  EXPECT_EQ(text_in(*store, "a"), "one");
  put_text("a", "other");
  EXPECT_EQ(text_in(*store, "a"), "one");
  // What has come since is found by who opens it.
  put_text("late", "three");
  EXPECT_EQ(text_in(*store, "late"), "three");
  EXPECT_EQ(code_of([&] { (void)store->open("none"); }), ErrorCode::not_found);
}

// fault-rows C04: the names of one save are not looked for in a listing of the next.
TEST_F(Snapshot, AnObjectThatWasReplacedBetweenTwoListingsIsAConflict) {
  const TemporaryDirectory directory;
  const auto disk = posix_store(directory.path());
  const std::string texts[] = {"old", "new"};
  for (const std::string& text : texts) {
    const auto store = snapshot_store(disk, true);
    put(*disk, "a", std::as_bytes(std::span(text)), IfExists::replace);
    EXPECT_EQ(text_in(*store, "a"), text);
    EXPECT_EQ(store->list("").size(), 1U);
  }
  const auto store = snapshot_store(disk, true);
  EXPECT_EQ(text_in(*store, "a"), "new");
  put(*disk, "a", std::as_bytes(std::span(texts[0])), IfExists::replace);
  EXPECT_EQ(code_of([&] { (void)store->list(""); }), ErrorCode::conflict);
}

TEST_F(Snapshot, AfterAWriteAllIsAskedAnew) {
  const auto store = snapshot_store(asked_, true);
  EXPECT_EQ(text_in(*store, "a"), "one");
  const std::string text = "mine";
  put(*store, "a", std::as_bytes(std::span(text)), IfExists::replace);
  EXPECT_EQ(text_in(*store, "a"), "mine");
  store->remove("a");
  EXPECT_FALSE(store->exists("a"));
}

TEST_F(Snapshot, NamesThatLeaveTheRootAreUnsafe) {
  for (const bool lists : {false, true}) {
    const auto store = snapshot_store(asked_, lists);
    EXPECT_EQ(code_of([&] { (void)store->open("../x"); }), ErrorCode::unsafe);
    EXPECT_EQ(code_of([&] { (void)store->exists("a/../../x"); }), ErrorCode::unsafe);
  }
}

}  // namespace
}  // namespace tessera
