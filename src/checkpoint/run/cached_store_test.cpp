#include "tessera/copy.h"

#include <span>

#include <gmock/gmock.h>

#include "checkpoint/run/testing.h"

namespace tessera {

// A store with a cache: checkpoint-rows O-06, O-22, O-23.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;
namespace fs = std::filesystem;

// Counts the bytes that are read of data: of files that have them beside what tells of it.
class CountingStore final : public testing_support::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return std::make_shared<Source>(ForwardingStore::open(name), bytes);
  }
  std::shared_ptr<std::atomic<std::uint64_t>> bytes =
      std::make_shared<std::atomic<std::uint64_t>>(0);

 private:
  class Source final : public ByteSource {
   public:
    Source(std::shared_ptr<ByteSource> source, std::shared_ptr<std::atomic<std::uint64_t>> bytes)
        : source_(std::move(source)), bytes_(std::move(bytes)) {}
    [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
    [[nodiscard]] const std::string& name() const override { return source_->name(); }
    void read_at(std::uint64_t offset, MutableByteView out) const override {
      *bytes_ += out.size();
      source_->read_at(offset, out);
    }

   private:
    std::shared_ptr<ByteSource> source_;
    std::shared_ptr<std::atomic<std::uint64_t>> bytes_;
  };
};

std::shared_ptr<Store> copy_of_all(const std::shared_ptr<Store>& from) {
  auto to = memory_store("cache");
  copy_objects(from, *to);
  return to;
}

// Changes one byte; by default in the middle.
void damage(Store& store, const std::string& name, std::size_t at = 0) {
  auto bytes = read_all(*store.open(name), 1 << 26);
  bytes[at > 0 ? at : bytes.size() / 2] ^= std::byte{1};
  put(store, name, bytes, IfExists::replace);
}

std::string data_file_in(const Store& store) {
  for (const ObjectInfo& object : store.list()) {
    if (object.name.ends_with(".distcp")) return object.name;
  }
  throw std::runtime_error("no data file");
}

std::vector<float> weight_in(const std::shared_ptr<Store>& store) {
  return floats(Checkpoint::open(store).load().at("weight").as_tensor());
}

TEST(CachedStore, TensorsComeFromTheCache_O22) {
  const auto store = std::make_shared<CountingStore>(memory_store());
  save_step(store, 1, 3 << 15);  // 3 MiB
  const auto cache = copy_of_all(store);
  const auto wanted = weight_in(store);
  EXPECT_GT(*store->bytes, 3U << 20);
  *store->bytes = 0;
  EXPECT_EQ(weight_in(cached_store(store, cache)), wanted);
  EXPECT_LT(*store->bytes, 100'000U);
}

TEST(CachedStore, EveryKindIsRead_O06) {
  for (const CheckpointKind kind : marked_kinds()) {
    SCOPED_TRACE(to_string(kind));
    const auto store = posix_store(written(kind));
    const Checkpoint plain = Checkpoint::open(store);
    const Checkpoint cached = Checkpoint::open(cached_store(store, copy_of_all(store)));
    EXPECT_THAT(diff(plain, cached), IsEmpty());
    EXPECT_THAT(verify(cached).findings, IsEmpty());
  }
}

// Each block that does not agree comes from the store.
TEST(CachedStore, ADamagedCopyIsNotTaken) {
  const auto store = memory_store();
  save_step(store, 1, 3 << 15);
  const auto wanted = weight_in(store);
  for (const std::string& name : {data_file_in(*store), std::string(".metadata")}) {
    const auto cache = copy_of_all(store);
    damage(*cache, name);
    EXPECT_EQ(weight_in(cached_store(store, cache)), wanted) << name;
  }
}

// The cache does not hide that the checkpoint is damaged where it has no copy.
TEST(CachedStore, DamageInTheStoreIsFound) {
  const auto store = memory_store();
  save_step(store, 1, 3 << 15);
  const auto cache = copy_of_all(store);
  const std::string name = data_file_in(*store);
  damage(*store, name);
  EXPECT_EQ(weight_in(cached_store(store, cache)).front(), 1.0F);
  cache->remove(name);
  EXPECT_EQ(code_of([&] { (void)weight_in(cached_store(store, cache)); }), ErrorCode::corrupt);
}

// PyTorch's files have no digests, and those of two steps have the same names and sizes.
TEST(CachedStore, ACopyOfAnotherStepIsNotTaken) {
  const std::string golden =
      std::string(TESSERA_TEST_DATA) + "/golden/fsdp1_uop1_ws2/model_and_optim";
  const auto store = posix_store(golden);
  const Checkpoint plain = Checkpoint::open(store);
  const auto same = std::make_shared<CountingStore>(copy_of_all(store));
  EXPECT_THAT(diff(plain, Checkpoint::open(cached_store(store, same))), IsEmpty());
  EXPECT_GT(*same->bytes, 0U);
  for (const bool has_metadata : {false, true}) {
    const auto other = copy_of_all(store);
    damage(*other, data_file_in(*other));
    if (has_metadata) {
      damage(*other, ".metadata");
    } else {
      other->remove(".metadata");
    }
    EXPECT_THAT(diff(plain, Checkpoint::open(cached_store(store, other))), IsEmpty());
  }
}

// The same with files that are longer than what is compared of them.
TEST(CachedStore, WithoutDigestsTheMetadataIsCompared) {
  const auto store = memory_store();
  save_step(store, 1, 3 << 15);
  for (const ObjectInfo& object : store->list()) {
    if (object.name.ends_with(".json")) store->remove(object.name);
  }
  const auto wanted = weight_in(store);
  const auto other = copy_of_all(store);
  damage(*other, data_file_in(*other), 1 << 20);
  damage(*other, ".metadata");
  EXPECT_EQ(weight_in(cached_store(store, other)), wanted);
}

TEST(CachedStore, WhatIsSavedThroughItIsRead) {
  const auto inner = memory_store();
  save_step(inner, 1);
  const auto store = cached_store(inner, copy_of_all(inner));
  EXPECT_EQ(weight_in(store).front(), 1.0F);
  inner->remove(".metadata");
  save_step(store, 2);
  EXPECT_EQ(weight_in(store).front(), 2.0F);
}

// Archives without digests: another tensor has another CRC-32 in the directory at the end.
TEST(CachedStore, ArchivesAreComparedByTheirEnds) {
  const auto file = [](float first) {
    const std::string path = temporary_directory() + "/model.pt";
    save_step(path, first, 3 << 15);
    return posix_store(fs::path(path).parent_path().string());
  };
  const auto store = file(1);
  const auto other = file(2);
  ASSERT_EQ(store->open("model.pt")->size(), other->open("model.pt")->size());
  const auto weight = [](const std::shared_ptr<Store>& of) {
    return floats(Checkpoint::open({of, "model.pt"}).load().at("weight").as_tensor());
  };
  const auto cache = std::make_shared<CountingStore>(copy_of_all(store));
  EXPECT_EQ(weight(cached_store(store, cache)), weight(store));
  EXPECT_GT(*cache->bytes, 3U << 20);
  EXPECT_EQ(weight(cached_store(store, other)), weight(store));
  // A longer one with the same end.
  auto longer = read_all(*store->open("model.pt"), 1 << 26);
  longer.insert(longer.begin(), 64, std::byte{0});
  put(*cache, "model.pt", longer, IfExists::replace);
  EXPECT_EQ(weight(cached_store(store, cache)), weight(store));
}

TEST(CachedStore, CopiesThatAreShortMissingOrUnreadableAreNotTaken) {
  const auto store = memory_store();
  save_step(store, 1);
  const auto wanted = weight_in(store);
  const std::string name = data_file_in(*store);
  const auto cache = copy_of_all(store);
  put(*cache, name, bytes_of("short"), IfExists::replace);
  EXPECT_EQ(weight_in(cached_store(store, cache)), wanted);
  cache->remove(name);
  put(*cache, name + "/x", {}, IfExists::fail);
  EXPECT_EQ(weight_in(cached_store(store, cache)), wanted);
  EXPECT_EQ(weight_in(cached_store(store, temporary_directory() + "/none")), wanted);
  // A disk that fails at any moment.
  for (std::uint64_t calls = 0; calls < 20; ++calls) {
    const auto dying =
        std::make_shared<DyingStore>(copy_of_all(store), calls, DyingStore::Counts::everything);
    EXPECT_EQ(weight_in(cached_store(store, dying)), wanted) << calls;
  }
}

TEST(CachedStore, WhatTheStoreHasNotIsNotThere) {
  const auto cache = memory_store();
  save_step(cache, 1);
  const auto store = cached_store(memory_store(), cache);
  EXPECT_THAT(store->list(), IsEmpty());
  EXPECT_FALSE(store->exists(".metadata"));
  EXPECT_EQ(code_of([&] { (void)store->open(".metadata"); }), ErrorCode::not_found);
}

TEST(CachedStore, WritesGoToTheStoreAlone) {
  const auto cache = memory_store();
  put(*cache, "x", bytes_of("old"), IfExists::fail);
  const auto inner = memory_store();
  const auto store = cached_store(inner, cache);
  put(*store, "x", bytes_of("new"), IfExists::fail);
  put(*store, "y", bytes_of("new"), IfExists::fail);
  EXPECT_EQ(text_of(*store->open("x")), "new");
  EXPECT_EQ(inner->list().size(), 2U);
  EXPECT_EQ(cache->list().size(), 1U);
  EXPECT_EQ(text_of(*cache->open("x")), "old");
}

// Copies that cannot be told from the files by their ends.
TEST(CachedStore, AfterAnyWayToWriteNothingIsReadFromTheCache) {
  std::vector<std::byte> old_bytes(3 << 20);
  auto new_bytes = old_bytes;
  new_bytes[5] = std::byte{1};
  const auto cache = memory_store();
  put(*cache, "d/x", old_bytes, IfExists::fail);
  const auto read = [&](const std::function<void(Store&)>& write) {
    const auto store = cached_store(memory_store(), cache);
    write(*store);
    return read_all(*store->open("d/x"), 4 << 20) == new_bytes;
  };
  EXPECT_TRUE(read([&](Store& store) { put(store, "d/x", new_bytes, IfExists::fail); }));
  EXPECT_TRUE(read([&](Store& store) {
    const auto sink = store.share("d/x");
    sink->write_at(0, new_bytes);
    sink->commit();
  }));
  const auto inner = memory_store();
  const auto directory = inner->new_directory("d", IfExists::fail);
  put(*inner, directory->working() + "/x", new_bytes, IfExists::fail);
  const auto store = cached_store(inner, cache);
  (void)store->new_directory("e", IfExists::fail);
  directory->commit();
  EXPECT_EQ(read_all(*store->open("d/x"), 4 << 20), new_bytes);
}

TEST(CachedStore, ADirectoryOfAStoreHasACache) {
  const auto bucket = memory_store();
  save_step(directory_in(bucket, "run/step1"), 1);
  const std::string disk = temporary_directory();
  save_step(disk, 2);
  EXPECT_EQ(weight_in(cached_store({bucket, "run/step1"}, disk)).front(), 1.0F);
}

}  // namespace
}  // namespace tessera
