// Digests of blocks while writing, and checked while reading.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/digest.h"
#include "base/parallel.h"
#include "conformance/errors.h"
#include "io/checked_source.h"
#include "io/testing.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  std::generate(bytes.begin(), bytes.end(), [&] { return std::byte(random()); });
  return bytes;
}

Digests digests_of(ByteView bytes) {
  Digests digests;
  for (std::size_t at = 0; at < bytes.size(); at += kDigestBlock)
    digests.push_back(
        digest64(bytes.subspan(at, std::min<std::size_t>(kDigestBlock, bytes.size() - at))));
  return digests;
}

// The bytes cut into parts of random sizes, blocks and more among them.
std::vector<std::pair<std::size_t, std::size_t>> parts_of(std::size_t size, std::mt19937& random) {
  std::vector<std::pair<std::size_t, std::size_t>> parts;
  for (std::size_t at = 0; at < size;) {
    const std::size_t longest = std::size_t{1} << (random() % 23);
    const std::size_t part = std::min(size - at, 1 + random() % longest);
    parts.emplace_back(at, part);
    at += part;
  }
  return parts;
}

TEST(BlockDigests, AnyOrderOfPartsGivesTheSame) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    const Bytes bytes = random_bytes(3 * kDigestBlock + seed * 1000, seed);
    auto parts = parts_of(bytes.size(), random);
    if (seed % 2 == 1) std::shuffle(parts.begin(), parts.end(), random);
    BlockDigests blocks;
    parallel_for(3, parts.size(), [&](std::size_t i) {
      blocks.add(parts[i].first, ByteView(bytes).subspan(parts[i].first, parts[i].second));
    });
    EXPECT_EQ(blocks.finish(bytes.size()), digests_of(bytes)) << seed;
  }
}

TEST(BlockDigests, WhatNobodyWroteIsZero) {
  Bytes bytes(2 * kDigestBlock + 5);
  bytes[10] = bytes[20] = std::byte{7};
  BlockDigests blocks;
  blocks.add(20, ByteView(bytes).subspan(20, 1));
  blocks.add(10, ByteView(bytes).subspan(10, 1));
  blocks.add(kDigestBlock, ByteView(bytes).subspan(kDigestBlock));
  EXPECT_EQ(blocks.finish(bytes.size()), digests_of(bytes));
}

// Bytes in memory, whose requests cost as much as a parameter says.
class PricedSource final : public ByteSource {
 public:
  PricedSource(Bytes bytes, std::uint64_t cost)
      : bytes_(memory_source(std::move(bytes), "file")), cost_(cost) {}
  [[nodiscard]] std::uint64_t size() const override { return bytes_->size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    ++requests;
    bytes_->read_at(offset, out);
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    ++requests;
    for (const ReadRange& range : ranges) bytes_->read_at(range.offset, range.out);
  }
  [[nodiscard]] const std::string& name() const override { return bytes_->name(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return cost_; }

  mutable int requests = 0;

 private:
  std::shared_ptr<ByteSource> bytes_;
  std::uint64_t cost_;
};

class Checked : public testing::TestWithParam<std::uint64_t> {
 protected:
  std::shared_ptr<CheckedSource> source(const Bytes& content) {
    priced_ = std::make_shared<PricedSource>(content, GetParam());
    counting_ = std::make_shared<CountingSource>(priced_);
    return std::make_shared<CheckedSource>(counting_, digests_of(ByteView(bytes_).subspan(origin_)),
                                           origin_);
  }

  void expect_reads(const CheckedSource& source, std::uint64_t offset, std::size_t size) {
    Bytes out(size);
    source.read_at(offset, out);
    EXPECT_TRUE(
        std::equal(out.begin(), out.end(), bytes_.begin() + static_cast<std::ptrdiff_t>(offset)));
  }

  Bytes bytes_ = random_bytes(2 * kDigestBlock + 777, 1);
  std::size_t origin_ = 0;
  std::shared_ptr<PricedSource> priced_;
  std::shared_ptr<CountingSource> counting_;
};

INSTANTIATE_TEST_SUITE_P(Near, Checked, testing::Values(kNearRequest));
INSTANTIATE_TEST_SUITE_P(Far, Checked, testing::Values(1U << 20U));

TEST_P(Checked, GivesTheSameBytes) {
  std::mt19937 random(3);
  for (const std::size_t origin : {0, 5, 4096}) {
    origin_ = origin;
    const auto checked = source(bytes_);
    for (int i = 0; i < 200; ++i) {
      const std::size_t at = random() % bytes_.size();
      expect_reads(*checked, at, random() % (bytes_.size() - at + 1));
    }
  }
}

TEST_P(Checked, ReadingOnwardsReadsEachByteOnce) {
  const auto checked = source(bytes_);
  for (std::size_t at = 0; at < bytes_.size(); at += 1000)
    expect_reads(*checked, at, std::min<std::size_t>(1000, bytes_.size() - at));
  EXPECT_EQ(counting_->bytes(), bytes_.size());
  EXPECT_EQ(counting_->calls(), 3U);
}

TEST_P(Checked, APartOfABlockThatWasGoodIsReadAlone) {
  const auto checked = source(bytes_);
  expect_reads(*checked, 100, 1);
  expect_reads(*checked, kDigestBlock + 100, 1);
  EXPECT_EQ(counting_->bytes(), 2 * kDigestBlock);
  expect_reads(*checked, 200, 10);
  const bool is_far = GetParam() > kNearRequest;  // it is still in memory there
  EXPECT_EQ(counting_->bytes(), 2 * kDigestBlock + (is_far ? 0 : 10));
}

// Windows of an archive's elements begin a few hundred bytes behind a block's beginning.
TEST_P(Checked, ASharedBlockGoesWhenASmallBeginningAndTheRestWereTaken) {
  const bool is_near = GetParam() == kNearRequest;
  const auto checked = source(bytes_);
  const SharedBlocks sharing(16);
  expect_reads(*checked, 100, kDigestBlock);
  expect_reads(*checked, kDigestBlock + 100, kDigestBlock - 100);
  EXPECT_EQ(counting_->bytes(), 2 * kDigestBlock);
  expect_reads(*checked, kDigestBlock + 200, 10);
  EXPECT_EQ(counting_->bytes(), 2 * kDigestBlock + (is_near ? 10 : 0));
}

// Gives other bytes the n-th time that it is read.
class DamagedOnce final : public ByteSource {
 public:
  DamagedOnce(Bytes bytes, std::uint64_t cost, int at)
      : bytes_(memory_source(std::move(bytes), "file")), cost_(cost), left_(at) {}
  [[nodiscard]] std::uint64_t size() const override { return bytes_->size(); }
  [[nodiscard]] const std::string& name() const override { return bytes_->name(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return cost_; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    bytes_->read_at(offset, out);
    if (left_-- == 0) out[out.size() / 2] ^= std::byte{1};
  }

 private:
  std::shared_ptr<ByteSource> bytes_;
  std::uint64_t cost_;
  mutable int left_;
};

// Whichever answer it is, also of a block that was good before where it is far.
TEST_P(Checked, BytesThatWereDamagedOnTheirWayAreReadAgain_O07) {
  for (int at = 0; at < 6; ++at) {
    const CheckedSource damaged(std::make_shared<DamagedOnce>(bytes_, GetParam(), at),
                                digests_of(bytes_));
    for (const std::size_t offset : {std::size_t{100}, std::size_t{kDigestBlock + 100}})
      expect_reads(damaged, offset, 10);
    if (GetParam() == kNearRequest) continue;
    for (const std::size_t offset : {std::size_t{200}, std::size_t{kDigestBlock + 200}})
      expect_reads(damaged, offset, kDigestBlock);
  }
}

TEST_P(Checked, AnyChangedByteOfABlockRefusesAllOfIt) {
  for (const std::size_t damage : {std::size_t{0}, std::size_t{kDigestBlock}, bytes_.size() - 1}) {
    Bytes changed = bytes_;
    changed[damage] ^= std::byte{1};
    const auto checked = source(changed);
    const std::size_t block = damage / kDigestBlock * kDigestBlock;
    for (const std::size_t at : {block, block + 700}) {
      for (int again = 0; again < 2; ++again) {
        Bytes out(10);
        const Error error = error_of([&] { checked->read_at(at, out); });
        EXPECT_EQ(error.code(), ErrorCode::corrupt);
        EXPECT_EQ(error.path(), "file");
        EXPECT_EQ(error.offset(), block);
      }
    }
  }
}

TEST_P(Checked, SeveralRangesAreTheSameBytes) {
  std::mt19937 random(5);
  for (int round = 0; round < 100; ++round) {
    origin_ = random() % 2 * 4096;
    const auto checked = source(bytes_);
    std::vector<std::size_t> offsets;
    for (std::size_t at = random() % 5000; at < bytes_.size() && offsets.size() < 100;
         at += 1 + random() % 200'000)
      offsets.push_back(at);
    std::shuffle(offsets.begin(), offsets.end(), random);
    std::vector<Bytes> outs;
    for (const std::size_t at : offsets)
      outs.emplace_back(random() % std::min<std::size_t>(bytes_.size() - at + 1, 300'000));
    std::vector<ReadRange> ranges;
    for (std::size_t i = 0; i < outs.size(); ++i) ranges.push_back({offsets[i], outs[i]});
    checked->read_ranges(ranges);
    for (std::size_t i = 0; i < outs.size(); ++i) {
      EXPECT_TRUE(std::equal(outs[i].begin(), outs[i].end(),
                             bytes_.begin() + static_cast<std::ptrdiff_t>(offsets[i])));
    }
  }
}

TEST(CheckedFarAway, AReadIsOneRequest) {
  const Bytes bytes = random_bytes(2 * kDigestBlock + 777, 1);
  const auto priced = std::make_shared<PricedSource>(bytes, 1U << 20U);
  const CheckedSource far(priced, digests_of(bytes));
  Bytes out(bytes.size() - 200);
  far.read_at(100, out);  // from inside of a block into another one
  EXPECT_EQ(priced->requests, 1);
  EXPECT_TRUE(std::equal(out.begin(), out.end(), bytes.begin() + 100));
  Bytes changed = bytes;
  changed[kDigestBlock + 5] ^= std::byte{1};
  const CheckedSource damaged(std::make_shared<PricedSource>(changed, 1U << 20U),
                              digests_of(bytes));
  EXPECT_EQ(error_of([&] { damaged.read_at(100, out); }).offset(), kDigestBlock);
}

TEST_P(Checked, OneAroundAnotherIsRefused) {
  const std::shared_ptr<const ByteSource> once = source(bytes_);
  EXPECT_EQ(code_of([&] { CheckedSource(once, digests_of(bytes_)); }), ErrorCode::invalid_argument);
}

TEST_P(Checked, ASizeThatTheDigestsDoNotFitIsRefused) {
  Bytes shorter(bytes_.begin(), bytes_.begin() + 10);
  EXPECT_EQ(error_of([&] { (void)source(shorter); }).code(), ErrorCode::incomplete);
  Bytes longer = bytes_;
  longer.resize(5 * kDigestBlock);
  EXPECT_EQ(error_of([&] { (void)source(longer); }).code(), ErrorCode::corrupt);
}

}  // namespace
}  // namespace tessera
