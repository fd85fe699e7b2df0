#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <fstream>

#include "conformance/store_conformance.h"
#include "conformance/temporary_directory.h"
#include "conformance/unprivileged.h"
#include "storage/forwarding_store.h"
#include "storage/storage.h"
#include "tessera/stores.h"

namespace tessera {

struct PosixMaker {
  std::shared_ptr<Store> make() { return posix_store(directory.path() + "/deep/store"); }
  TemporaryDirectory directory;
};
INSTANTIATE_TYPED_TEST_SUITE_P(Posix, StoreConformance, PosixMaker);

namespace {

void write_file(const std::string& path) {
  std::ofstream(path) << "x";
}

TEST(PosixStore, AFileInPlaceOfADirectoryIsAnError) {
  const TemporaryDirectory directory;
  write_file(directory.path() + "/file");
  const auto store = posix_store(directory.path() + "/file");
  EXPECT_EQ(code_of([&] { (void)store->create("x", IfExists::fail); }), ErrorCode::already_exists);
  EXPECT_EQ(code_of([&] { (void)store->open("x"); }), ErrorCode::not_found);
  EXPECT_TRUE(store->list().empty());
}

TEST(PosixStore, AUrlIsNoDirectory) {
  for (const char* url : {"s3://bucket/x", "gs://b", "file:///x", "a+b.c-1://"})
    EXPECT_EQ(code_of([&] { (void)posix_store(url); }), ErrorCode::unsupported) << url;
  for (const char* path : {"./s3://x", "/s3://x", "://x", "s3:/x", "s3", "a b://x", ""})
    EXPECT_NO_THROW((void)posix_store(path)) << path;
}

TEST(PosixStore, WhatWasReplacedAfterItWasListedIsAConflict_C04) {
  const TemporaryDirectory directory;
  const auto store = posix_store(directory.path());
  put(*store, "x", bytes_of("old"), IfExists::fail);
  const ObjectInfo listed = store->list().at(0);
  EXPECT_EQ(text_of(*store->open_listed(listed)), "old");
  put(*store, "x", bytes_of("new"), IfExists::replace);
  EXPECT_EQ(code_of([&] { (void)store->open_listed(listed); }), ErrorCode::conflict);
}

// Each mapping has its own changes, and none reaches the file.
TEST(PosixStore, MappingsOfAFile) {
  const TemporaryDirectory directory;
  const auto store = posix_store(directory.path());
  put(*store, "x", bytes_of("content"), IfExists::fail);
  put(*store, "nothing", {}, IfExists::fail);
  const auto source = store->open("x");
  const auto first = source->map();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first[6], std::byte{'t'});
  first[0] = std::byte{'X'};
  EXPECT_EQ(source->map()[0], std::byte{'c'});
  EXPECT_EQ(text_of(*source), "content");
  put(*store, "x", bytes_of("new"), IfExists::replace);
  store->remove("x");
  EXPECT_EQ(source->map()[6], std::byte{'t'});
  EXPECT_EQ(store->open("nothing")->map(), nullptr);
  put(*store, "y", bytes_of("content"), IfExists::fail);
  const auto changed = store->open("y");
  std::filesystem::resize_file(directory.path() + "/y", 3);
  EXPECT_EQ(code_of([&] { (void)changed->map(); }), ErrorCode::conflict);
}

// D07: only a regular file is an object; a FIFO must not block either.
TEST(PosixStore, OnlyRegularFilesAreObjects) {
  const TemporaryDirectory directory;
  const auto store = posix_store(directory.path());
  ASSERT_EQ(::mkfifo((directory.path() + "/fifo").c_str(), 0600), 0);
  ASSERT_EQ(::mkdir((directory.path() + "/directory").c_str(), 0700), 0);
  for (const char* name : {"fifo", "directory"}) {
    EXPECT_EQ(code_of([&] { (void)store->open(name); }), ErrorCode::io) << name;
    EXPECT_FALSE(store->exists(name)) << name;
  }
  EXPECT_EQ(code_of([&] { store->remove("directory"); }), ErrorCode::io);
  EXPECT_EQ(code_of([&] { (void)store->create("directory", IfExists::fail); }),
            ErrorCode::already_exists);
  EXPECT_TRUE(store->list().empty());
}

// The caches of model hubs are directories of links to files.
TEST(PosixStore, LinksToFilesAreObjects) {
  const TemporaryDirectory directory;
  const std::string revision = directory.path() + "/snapshots/revision";
  std::filesystem::create_directories(directory.path() + "/blobs");
  std::filesystem::create_directories(revision);
  write_file(directory.path() + "/blobs/file");
  std::filesystem::create_symlink("../../blobs/file", revision + "/link");
  std::filesystem::create_symlink("link", revision + "/inside");
  std::filesystem::create_symlink(".", revision + "/loop");
  const auto store = posix_store(revision);
  EXPECT_EQ(text_of(*store->open("link")), "x");
  EXPECT_EQ(text_of(*store->open("inside")), "x");
  ASSERT_EQ(store->list().size(), 2U);
  EXPECT_EQ(store->list()[1].name, "link");
  EXPECT_EQ(store->list()[1].size, 1U);
}

// M03, D07: no other link leads out of the store.
TEST(PosixStore, LinksThatLeaveTheStore) {
  const TemporaryDirectory directory;
  write_file(directory.path() + "/file");
  std::filesystem::create_directory(directory.path() + "/store");
  std::filesystem::create_symlink("../file", directory.path() + "/store/link");
  const auto store = posix_store(directory.path() + "/store");
  EXPECT_EQ(code_of([&] { (void)store->open("link"); }), ErrorCode::unsafe);
  std::filesystem::create_directory_symlink(directory.path() + "/store",
                                            directory.path() + "/same");
  write_file(directory.path() + "/store/own");
  EXPECT_EQ(text_of(*posix_store(directory.path() + "/same")->open("own")), "x");
}

TEST(PosixStore, ATruncatedFileIsIncomplete) {
  const TemporaryDirectory directory;
  const auto store = posix_store(directory.path());
  put(*store, "x", bytes_of("abcdef"), IfExists::fail);
  const auto source = store->open("x");
  std::filesystem::resize_file(directory.path() + "/x", 2);
  EXPECT_EQ(source->size(), 6U);
  EXPECT_EQ(code_of([&] { (void)text_of(*source); }), ErrorCode::incomplete);
}

// T18: what was opened stays what it was, or reading it fails.
TEST(PosixStore, AFileThatIsReplacedOrRewritten) {
  const TemporaryDirectory directory;
  const auto store = posix_store(directory.path());
  put(*store, "x", bytes_of("abcdef"), IfExists::fail);
  const auto source = store->open("x");
  put(*store, "x", bytes_of("ABCDEF"), IfExists::replace);
  EXPECT_EQ(text_of(*source), "abcdef");
  const auto newer = store->open("x");
  std::filesystem::last_write_time(
      directory.path() + "/x",
      std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(code_of([&] { (void)text_of(*newer); }), ErrorCode::conflict);
  const auto newest = store->open("x");
  std::ofstream(directory.path() + "/x", std::ios::app) << "more";
  EXPECT_EQ(code_of([&] { (void)text_of(*newest); }), ErrorCode::conflict);
  std::filesystem::remove(directory.path() + "/x");
  EXPECT_EQ(code_of([&] { (void)store->open("x"); }), ErrorCode::not_found);
}

TEST(PosixStore, SlashesAtTheEndDoNotMatter) {
  const TemporaryDirectory directory;
  const auto store = posix_store(directory.path() + "//");
  EXPECT_EQ(store->name(), directory.path());
  put(*store, "a/b", bytes_of("x"), IfExists::fail);
  ASSERT_EQ(store->list().size(), 1U);
  EXPECT_EQ(store->list()[0].name, "a/b");
}

TEST(PosixStore, WhatKilledWritersLeftIsHiddenAndRemovable) {
  const TemporaryDirectory directory;
  const auto store = posix_store(directory.path());
  put(*store, "a/x", bytes_of("kept"), IfExists::fail);
  write_file(directory.path() + "/.x.tmp-0123456789ab");
  write_file(directory.path() + "/a/..metadata.tmp-0123456789ab");
  write_file(directory.path() + "/.theirs.tmp-1");
  EXPECT_EQ(store->list().size(), 2U);
  store->remove_unfinished();
  EXPECT_EQ(store->list().size(), 2U);
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/.x.tmp-0123456789ab"));
  EXPECT_FALSE(std::filesystem::exists(directory.path() + "/a/..metadata.tmp-0123456789ab"));
  posix_store(directory.path() + "/none")->remove_unfinished();
}

// fault-rows F26: also of a directory inside of a store.
TEST(PosixStore, AHeldDirectoryIsMissedWhenItIsDeleted) {
  const TemporaryDirectory directory;
  const auto parent = posix_store(directory.path());
  const auto above = std::make_shared<SubStore>(parent, "a");
  const std::shared_ptr<Store> store = std::make_shared<SubStore>(above, "b");
  const auto held = store->hold();
  ASSERT_NE(held, nullptr);
  held->require_there();
  EXPECT_EQ(code_of([&] { (void)parent->hold("a/b"); }), ErrorCode::conflict);
  EXPECT_NE(parent->hold("a/c"), nullptr);
  std::filesystem::remove_all(directory.path() + "/a");
  put(*parent, "a/b/x", bytes_of("made again"), IfExists::fail);
  EXPECT_EQ(code_of([&] { held->require_there(); }), ErrorCode::conflict);
}

// F26, of a directory that is reached by links: whoever wants may move them, too.
TEST(PosixStore, AHeldDirectoryMayBeReachedByALink) {
  const TemporaryDirectory directory;
  const std::string& root = directory.path();
  ASSERT_EQ(::mkdir((root + "/real").c_str(), 0700), 0);
  ASSERT_EQ(::symlink("real", (root + "/link").c_str()), 0);
  ASSERT_EQ(::symlink("link", (root + "/further").c_str()), 0);
  for (const std::string& link : {root + "/link", root + "/further"}) {
    const auto store = posix_store(link);
    auto held = store->hold();
    held->require_there();
    EXPECT_EQ(code_of([&] { (void)posix_store(root + "/real")->hold(); }), ErrorCode::conflict);
    put(*store, "x", bytes_of("x"), IfExists::replace);
    std::filesystem::rename(root + "/real", root + "/away");
    EXPECT_EQ(code_of([&] { held->require_there(); }), ErrorCode::conflict);
    ASSERT_EQ(::mkdir((root + "/real").c_str(), 0700), 0);
    EXPECT_EQ(code_of([&] { held->require_there(); }), ErrorCode::conflict);
    std::filesystem::remove(root + "/real");
    std::filesystem::rename(root + "/away", root + "/real");
    held->require_there();
    EXPECT_TRUE(std::filesystem::is_symlink(link));
  }
}

// Counts, of a directory and of all.
class ListingStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    ++lists;
    return ForwardingStore::list(prefix);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    levels.emplace_back(prefix);
    return inner().list_level(prefix);
  }
  mutable int lists = 0;
  mutable std::vector<std::string> levels;
};

TEST(NearObjects, AreLookedForInTheirOwnDirectoriesAlone) {
  const TemporaryDirectory directory;
  const ListingStore store(posix_store(directory.path()));
  for (const char* name : {"x", "a/y", "a/b/z", "lost/found"})
    put(*posix_store(directory.path()), name, bytes_of(name), IfExists::fail);
  NearObjects objects(store);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(objects.find("x")->size, 1U);
    EXPECT_EQ(objects.find("a/b/z")->name, "a/b/z");
    for (const char* name : {"", "a", "none", "a/none", "none/x", "x/y", "a/b"})
      EXPECT_EQ(objects.find(name), nullptr) << name;
  }
  EXPECT_EQ(store.levels, (std::vector<std::string>{"", "a/b", "a", "none", "x"}));
  EXPECT_EQ(code_of([&] { (void)objects.find("../x"); }), ErrorCode::unsafe);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(objects.find("d" + std::to_string(i) + "/x"), nullptr);
  EXPECT_LT(store.levels.size(), 70U);
  EXPECT_EQ(store.lists, 1);
  EXPECT_EQ(objects.find("a/y")->size, 3U);
}

TEST(PosixStore, WhatIsClosedIsPassedOverUnlessItIsAskedFor) {
  const TemporaryDirectory directory;
  const std::string& root = directory.path();
  const auto store = posix_store(root);
  put(*store, "x", bytes_of("x"), IfExists::fail);
  put(*store, "closed/y", bytes_of("y"), IfExists::fail);
  write_file(root + "/.x.tmp-0123456789ab");
  Unprivileged::give(root);
  Unprivileged::give(root + "/.x.tmp-0123456789ab");
  const ClosedDirectory closed(root + "/closed");
  const Unprivileged unprivileged;
  ASSERT_EQ(store->list().size(), 1U);
  EXPECT_EQ(store->list()[0].name, "x");
  EXPECT_EQ(code_of([&] { (void)store->list("closed"); }), ErrorCode::io);
  EXPECT_EQ(code_of([&] { (void)store->list_level("closed"); }), ErrorCode::io);
  NearObjects objects(*store);
  EXPECT_NE(objects.find("x"), nullptr);
  EXPECT_EQ(code_of([&] { (void)objects.find("closed/y"); }), ErrorCode::io);
  store->remove_unfinished();
  EXPECT_FALSE(std::filesystem::exists(root + "/.x.tmp-0123456789ab"));
}

TEST(Location, ASignedAddressIsShownWithoutItsSignature) {
  EXPECT_EQ(to_string(Location("https://h/x.pt?X-Amz-Signature=1")), "https://h/x.pt");
  EXPECT_EQ(to_string(Location("what?.pt")), "what?.pt");
  EXPECT_EQ(to_string(Location("https/what?.pt")), "https/what?.pt");
}

TEST(PosixStore, SaysWhichFileSystemsNeverShowLate) {
  EXPECT_TRUE(posix_store("/proc/self")->may_show_late());  // not on the list
  struct statfs status {};
  if (::statfs("/dev/shm", &status) != 0 || status.f_type != TMPFS_MAGIC)
    GTEST_SKIP() << "/dev/shm is no tmpfs";
  const auto store = posix_store("/dev/shm/tessera-is-not-there/yet");
  EXPECT_FALSE(store->may_show_late());
  EXPECT_FALSE(SubStore(store, "below").may_show_late());
  EXPECT_FALSE(ForwardingStore(store).may_show_late());
}

}  // namespace
}  // namespace tessera
