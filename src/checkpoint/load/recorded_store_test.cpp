#include "checkpoint/load/recorded_store.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "conformance/errors.h"
#include "conformance/short_patience.h"
#include "tessera/error.h"

namespace tessera {
namespace {

Bytes numbered(std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i);
  return bytes;
}

Bytes recorded_part(const Store& store, std::string_view name, std::uint64_t offset,
                    std::size_t size) {
  Bytes bytes(size);
  store.open(name)->read_at(offset, bytes);
  return bytes;
}

bool is_part(const Bytes& bytes, std::size_t offset) {
  const Bytes all = numbered(offset + bytes.size());
  return std::equal(bytes.begin(), bytes.end(), all.begin() + static_cast<std::ptrdiff_t>(offset));
}

class Recorded : public ::testing::Test {
 protected:
  Recorded() {
    put(*first_, "dir/a", numbered(100), IfExists::fail);
    put(*first_, "b", numbered(50), IfExists::fail);
    const auto recorder = recording_store(first_);
    EXPECT_EQ(recorder->list().size(), 2U);
    EXPECT_EQ(recorder->list_level("dir").size(), 1U);
    EXPECT_TRUE(recorder->exists("b"));
    EXPECT_FALSE(recorder->exists("c"));
    EXPECT_EQ(code_of([&] { (void)recorder->open("c"); }), ErrorCode::not_found);
    (void)recorded_part(*recorder, "dir/a", 10, 20);
    (void)recorded_part(*recorder, "dir/a", 10, 5);
    record_ = recorder->finish();
    (void)recorded_part(*recorder, "b", 0, 50);  // no longer recorded
  }

  std::shared_ptr<Store> first_ = memory_store("first");
  Bytes record_;
};

// The other rank's store is empty: it is not asked.
TEST_F(Recorded, AnswersComeAgain) {
  const auto store = replaying_store(memory_store("second"), {record_});
  EXPECT_EQ(store->name(), "second");
  EXPECT_EQ(store->list().size(), 2U);
  EXPECT_EQ(store->list().at(0).size, 50U);
  EXPECT_EQ(store->list_level("dir").at(0).name, "dir/a");
  EXPECT_TRUE(store->exists("b"));
  EXPECT_FALSE(store->exists("c"));
  const auto source = store->open("dir/a");
  EXPECT_EQ(source->size(), 100U);
  EXPECT_EQ(source->name(), "second/dir/a");
  EXPECT_TRUE(is_part(recorded_part(*store, "dir/a", 10, 20), 10));
  EXPECT_TRUE(is_part(recorded_part(*store, "dir/a", 25, 5), 25));
  EXPECT_EQ(code_of([&] { (void)store->open("c"); }), ErrorCode::not_found);
  // What is known to be there is waited for, and what is not recorded of it, too.
  const testing_support::ShortPatience patience;
  EXPECT_EQ(code_of([&] { (void)recorded_part(*store, "dir/a", 25, 6); }), ErrorCode::incomplete);
  EXPECT_EQ(code_of([&] { (void)store->open("b"); }), ErrorCode::incomplete);
}

TEST_F(Recorded, WhatIsGoneFromAnotherSaveIsNotWaitedFor) {
  const auto is_replaced = [] { return true; };
  const auto store = replaying_store(memory_store("second"), {record_, {}, is_replaced});
  EXPECT_EQ(code_of([&] { (void)store->open("b"); }), ErrorCode::not_found);
}

TEST_F(Recorded, WhatWasNotAskedIsAskedOfTheRanksOwnStore) {
  const auto store = replaying_store(first_, {record_});
  EXPECT_EQ(store->list("dir").size(), 1U);
  EXPECT_TRUE(is_part(recorded_part(*store, "dir/a", 25, 60), 25));
  EXPECT_TRUE(is_part(recorded_part(*store, "b", 3, 4), 3));
  Bytes known(4), unknown(4);
  const ReadRange ranges[] = {{12, known}, {60, unknown}};
  store->open("dir/a")->read_ranges(ranges);
  EXPECT_TRUE(is_part(known, 12));
  EXPECT_TRUE(is_part(unknown, 60));
}

TEST_F(Recorded, AnObjectOfAnotherSizeIsAConflict) {
  const auto other = memory_store("second");
  put(*other, "dir/a", numbered(99), IfExists::fail);
  const auto store = replaying_store(other, {record_});
  EXPECT_EQ(code_of([&] { (void)recorded_part(*store, "dir/a", 50, 10); }), ErrorCode::conflict);
}

}  // namespace
}  // namespace tessera
