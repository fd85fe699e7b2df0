#include "storage/cache/block_cache.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "conformance/errors.h"
#include "conformance/store_conformance.h"
#include "conformance/temporary_directory.h"
#include "storage/forwarding_store.h"
#include "tessera/stores.h"

namespace tessera {

// Reads through a local cache are those of the store, whatever became of the cache (fault-rows
// O28).

namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;

constexpr std::uint64_t kMebi = 1U << 20U;

// Counts what is read of the store behind the cache, whose versions no other process meets.
class CountedSource final : public ByteSource {
 public:
  CountedSource(std::shared_ptr<ByteSource> source, std::atomic<std::uint64_t>& bytes)
      : source_(std::move(source)), bytes_(bytes) {}
  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::string version() const override { return source_->version(); }
  [[nodiscard]] std::string identity() const override { return name() + '\0' + version(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    bytes_ += out.size();
    source_->read_at(offset, out);
  }

 private:
  std::shared_ptr<ByteSource> source_;
  std::atomic<std::uint64_t>& bytes_;
};

class CountedStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return std::make_shared<CountedSource>(ForwardingStore::open(name), bytes);
  }
  mutable std::atomic<std::uint64_t> bytes{0};
};

struct MemoryBehindACache {
  std::shared_ptr<Store> make() {
    return block_cached_store(std::make_shared<CountedStore>(memory_store()),
                              std::make_shared<BlockCache>(directory.path(), 100 * kMebi));
  }
  TemporaryDirectory directory;
};
INSTANTIATE_TYPED_TEST_SUITE_P(CachedMemory, StoreConformance, MemoryBehindACache);

class Caching : public ::testing::Test {
 protected:
  Caching() { put_object(9 * kMebi + 77, 1); }

  void put_object(std::size_t size, unsigned seed) {
    std::mt19937 random(seed);
    bytes_.resize(size);
    for (std::byte& byte : bytes_) byte = static_cast<std::byte>(random());
    put(*store_, "a", bytes_, IfExists::replace);
  }
  std::shared_ptr<Store> cached(std::uint64_t most = 100 * kMebi) {
    return block_cached_store(store_, std::make_shared<BlockCache>(directory_.path(), most));
  }
  void expect_reads(const ByteSource& source, std::uint64_t offset, std::size_t size) {
    Bytes out(size);
    source.read_at(offset, out);
    EXPECT_TRUE(std::equal(out.begin(), out.end(), bytes_.begin() + static_cast<long>(offset)));
  }
  void expect_whole(const Store& store) { expect_reads(*store.open("a"), 0, bytes_.size()); }

  [[nodiscard]] std::vector<fs::path> blocks() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator(directory_.path()))
      if (entry.is_regular_file() && entry.path().parent_path().filename().string().size() == 64)
        found.push_back(entry.path());
    return found;
  }

  TemporaryDirectory directory_;
  std::shared_ptr<CountedStore> store_ = std::make_shared<CountedStore>(memory_store());
  Bytes bytes_;
};

TEST_F(Caching, WhatWasReadOnceIsReadNoMore) {
  expect_whole(*cached());
  EXPECT_EQ(store_->bytes, bytes_.size());
  expect_whole(*cached());
  expect_reads(*cached()->open("a"), 5 * kMebi - 3, 1000);
  EXPECT_EQ(store_->bytes, bytes_.size());
  EXPECT_EQ(blocks().size(), 3U);
}

// Users whose group is their own usually have this umask.
TEST_F(Caching, AUmaskThatLetsTheGroupWriteDoesNotMatter) {
  const mode_t before = ::umask(002);
  expect_whole(*cached());
  ::umask(before);
  EXPECT_EQ(blocks().size(), 3U);
  expect_whole(*cached());
  EXPECT_EQ(store_->bytes, bytes_.size());
}

TEST_F(Caching, AnyRangesAreTheSameBytes) {
  std::mt19937 random(4);
  for (int round = 0; round < 40; ++round) {
    if (round % 8 == 0) fs::remove_all(directory_.path());
    const auto source = cached()->open("a");
    std::vector<std::size_t> offsets;
    std::vector<Bytes> outs;
    for (int i = 0; i < 12; ++i) {
      offsets.push_back(random() % bytes_.size());
      outs.emplace_back(random() % std::min<std::size_t>(bytes_.size() - offsets.back() + 1,
                                                         i % 3 == 0 ? 9 * kMebi : 5000));
    }
    std::vector<ReadRange> ranges;
    for (std::size_t i = 0; i < outs.size(); ++i) ranges.push_back({offsets[i], outs[i]});
    source->read_ranges(ranges);
    for (std::size_t i = 0; i < outs.size(); ++i)
      EXPECT_TRUE(std::equal(outs[i].begin(), outs[i].end(),
                             bytes_.begin() + static_cast<long>(offsets[i])));
  }
}

TEST_F(Caching, ADamagedBlockIsReadAnew_O28) {
  std::mt19937 random(7);
  expect_whole(*cached());
  for (int round = 0; round < 30; ++round) {
    const std::vector<fs::path> kept = blocks();
    const fs::path& block = kept[random() % kept.size()];
    const auto size = fs::file_size(block);
    if (round % 3 == 0) {
      fs::resize_file(block, random() % size);
    } else {
      std::fstream file(block, std::ios::in | std::ios::out | std::ios::binary);
      const auto at = static_cast<std::streamoff>(random() % size);
      file.seekg(at);
      const int byte = file.get();
      file.seekp(at);
      file.put(static_cast<char>(byte ^ (1 << random() % 8)));
    }
    expect_whole(*cached());
    EXPECT_EQ(blocks().size(), 3U);
  }
}

TEST_F(Caching, AnotherVersionIsAnotherObject_O28) {
  expect_whole(*cached());
  const auto old = cached()->open("a");
  const Bytes before = bytes_;
  put_object(bytes_.size(), 2);
  expect_whole(*cached());
  bytes_ = before;  // memory keeps old versions for who has them open
  expect_reads(*old, 0, bytes_.size());
}

TEST_F(Caching, TheOldestGoWhenItIsFull) {
  const auto total = [&] {
    std::uintmax_t bytes = 0;
    for (const fs::path& block : blocks()) bytes += fs::file_size(block);
    return bytes;
  };
  for (unsigned seed = 1; seed < 6; ++seed) {
    put_object(6 * kMebi, seed);
    expect_whole(*cached(14 * kMebi));
    EXPECT_LE(total(), 14 * kMebi);
  }
  EXPECT_GE(total(), 5 * kMebi);
  expect_whole(*cached(14 * kMebi));
  fs::remove_all(directory_.path());
  expect_whole(*cached(kMebi));  // holds no block
  EXPECT_TRUE(!fs::exists(directory_.path()) || blocks().empty());
}

TEST_F(Caching, WithoutADiskThatTakesItTheStoreIsRead) {
  std::ofstream(directory_.path() + "/file") << "";
  const auto store = block_cached_store(
      store_, std::make_shared<BlockCache>(directory_.path() + "/file", 100 * kMebi));
  expect_whole(*store);
  expect_whole(*store);
}

TEST_F(Caching, ThreadsAndProcessesShareADirectory) {
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < 6; ++i) {
    threads.emplace_back([this, i] {
      std::mt19937 random(i);
      const auto source = cached(10 * kMebi)->open("a");
      for (int round = 0; round < 20; ++round) {
        const std::size_t at = random() % bytes_.size();
        expect_reads(*source, at, random() % (bytes_.size() - at));
      }
    });
  }
}

TEST_F(Caching, AKillWhileItIsFilledLeavesNothingThatIsTaken) {
  std::mt19937 random(3);
  const std::string gone = directory_.path() + "/gone";  // a kill must not leave half of a cache
  for (int round = 0; round < 15; ++round) {
    fs::remove_all(directory_.path());
    const pid_t child = ::fork();
    if (child == 0) {
      for (;;) {
        const auto source = cached()->open("a");
        Bytes out(bytes_.size());
        source->read_at(0, out);
        fs::rename(CacheDirectory(directory_.path()).path(), gone);
        fs::remove_all(gone);
      }
    }
    ::usleep(random() % 40'000);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    expect_whole(*cached());
    expect_whole(*cached());
  }
}

TEST_F(Caching, WithoutAnIdentityNothingIsKept) {
  auto plain = memory_store();
  put(*plain, "a", bytes_, IfExists::fail);
  const auto store =
      block_cached_store(plain, std::make_shared<BlockCache>(directory_.path(), 100 * kMebi));
  expect_whole(*store);
  EXPECT_TRUE(directory_.empty());
}

// Whoever mixes files up does not make one block another.
TEST_F(Caching, ABlockIsTakenInItsPlaceAlone) {
  const auto copy = [](const fs::path& from, const fs::path& to) {
    fs::copy_file(from, to, fs::copy_options::overwrite_existing);
  };
  expect_whole(*cached());
  const fs::path old = blocks().front().parent_path();
  copy(old / "0", old / "1");
  expect_whole(*cached());
  put_object(bytes_.size(), 2);
  for (const char* name : {"0", "1", "2"}) {
    expect_whole(*cached());
    for (const fs::path& block : blocks())
      if (block.parent_path() != old && block.filename() == name) copy(old / name, block);
  }
  expect_whole(*cached());
}

// Half a block, from a crash: it is written anew under its name, and not removed to make room.
TEST_F(Caching, WhatLacksItsSealIsReplacedAndNotRemoved) {
  expect_whole(*cached());
  for (const fs::path& block : blocks()) fs::resize_file(block, 5);
  expect_whole(*cached());
  const std::uint64_t before = store_->bytes;
  EXPECT_EQ(before, 2 * bytes_.size());
  expect_whole(*cached());
  EXPECT_EQ(store_->bytes, before);
  const std::vector<fs::path> cut = blocks();
  for (const fs::path& block : cut) fs::resize_file(block, 4 * kMebi);
  for (unsigned seed = 2; seed < 5; ++seed) {
    put_object(4 * kMebi, seed);
    expect_whole(*cached(5 * kMebi));
  }
  for (const fs::path& block : cut) EXPECT_TRUE(fs::exists(block)) << block;
  EXPECT_EQ(blocks().size(), cut.size() + 1);
}

TEST_F(Caching, IsUsedFromNowOn) {
  EXPECT_EQ(with_local_cache(store_), store_);
  use_local_cache(LocalCache{directory_.path()});
  expect_whole(*with_local_cache(store_));
  EXPECT_EQ(blocks().size(), 3U);
  EXPECT_EQ(code_of([] { use_local_cache(LocalCache{}); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([] { use_local_cache(LocalCache{"s3://bucket/cache"}); }),
            ErrorCode::unsupported);
  use_local_cache(std::nullopt);
  EXPECT_EQ(with_local_cache(store_), store_);
}

}  // namespace
}  // namespace tessera
