#include "checkpoint/read/storage_checks.h"

#include <gtest/gtest.h>

#include "base/crc32.h"
#include "checkpoint/test_support.h"
#include "io/testing.h"

namespace tessera {
namespace {

using testing_support::copy_of;

class StorageChecksTest : public testing::Test {
 protected:
  StorageChecksTest() {
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<std::byte>(i * 7);
    source_ = std::make_shared<CountingSource>(memory_source(bytes_, "file"));
    storage_->source = source_;
    storage_->size = bytes_.size();
    storage_->crc32 = crc32(bytes_);
  }

  [[nodiscard]] ReadRun run(std::uint64_t at, std::uint64_t end) const {
    return {at, end - at, crc32(std::span(bytes_).subspan(at, end - at))};
  }
  void add(std::vector<ReadRun> runs) { checks_.add(*storage_, storage_, runs, "w"); }

  std::vector<std::byte> bytes_ = std::vector<std::byte>(100);
  std::shared_ptr<CountingSource> source_;
  std::shared_ptr<Storage> storage_ = std::make_shared<Storage>();
  StorageChecks checks_;
};

TEST_F(StorageChecksTest, PartsInAnyOrderAreAsGoodAsTheWhole) {
  add({run(40, 60), run(0, 20)});
  add({run(60, 100)});
  add({run(20, 40)});
  EXPECT_EQ(checks_.read_rest(2).bytes_read, 0U);
  EXPECT_EQ(source_->bytes(), 0U);
}

TEST_F(StorageChecksTest, TheLastPartShowsTheDamage) {
  add({run(50, 100)});
  ReadRun damaged = run(0, 50);
  damaged.crc ^= 1;
  const Error error = error_of([&] { add({damaged}); });
  EXPECT_EQ(error.code(), ErrorCode::corrupt);
  EXPECT_NE(std::string(error.what()).find('w'), std::string::npos);
}

TEST_F(StorageChecksTest, MissingPartsOverlapsAndUnfollowedReadsAreReadAgain) {
  for (const std::vector<ReadRun>& runs :
       {std::vector{run(0, 99)}, {run(0, 60), run(50, 100)}, {run(50, 100), run(0, 60)}, {}}) {
    add(runs);
    EXPECT_EQ(checks_.read_rest(2).bytes_read, 100U);
    add(runs);
    storage_->crc32 = *storage_->crc32 ^ 1U;
    EXPECT_EQ(code_of([&] { (void)checks_.read_rest(2); }), ErrorCode::corrupt);
    storage_->crc32 = *storage_->crc32 ^ 1U;
  }
}

TEST_F(StorageChecksTest, WhatWasComparedStaysCompared) {
  add({run(0, 50)});
  add({run(50, 100)});
  add({run(20, 30)});  // a view of a part
  EXPECT_EQ(checks_.read_rest(2).bytes_read, 0U);
}

// What PyTorch saved by two ranks goes to three: every byte is read once, and all are checked.
TEST(Reshard, ReadsEveryByteOnceAndChecksIt) {
  const std::string source = copy_of(std::string(TESSERA_TEST_DATA) + "/golden/checkpoints/g4_ws2");
  ConvertOptions options;
  options.to = CheckpointKind::dcp;
  options.ranks = 3;
  const std::string target = testing_support::temporary_directory() + "/target";
  const ConvertReport report = convert(source, target, options);
  EXPECT_GT(report.io.bytes_needed, 0U);
  EXPECT_EQ(report.io.bytes_read, report.io.bytes_needed);
  EXPECT_EQ(report.io.bytes_unchecked, 0U);
}

}  // namespace
}  // namespace tessera
