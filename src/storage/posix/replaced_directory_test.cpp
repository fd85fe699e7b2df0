#include "storage/posix/replaced_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "conformance/errors.h"
#include "conformance/store_conformance.h"
#include "conformance/temporary_directory.h"
#include "storage/posix/lock.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

TEST(NewDirectories, WhatWasNotThereGoesUnlessSomethingIsInIt) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/a/b/c";
  {
    const NewDirectories made(path + "/");
    fs::create_directories(path);
  }
  EXPECT_TRUE(directory.empty());
  {
    const NewDirectories made(path);
    fs::create_directories(path);
    std::ofstream(directory.path() + "/a/kept") << "x";
  }
  EXPECT_TRUE(fs::exists(directory.path() + "/a/kept"));
  EXPECT_FALSE(fs::exists(directory.path() + "/a/b"));
  {
    NewDirectories made(path);
    fs::create_directories(path);
    made.keep();
  }
  EXPECT_TRUE(fs::exists(path));
}

TEST(LockedDirectory, ASecondOneIsAConflict) {
  const TemporaryDirectory directory;
  {
    const LockedFd lock = locked_directory(directory.path());
    EXPECT_EQ(code_of([&] { (void)locked_directory(directory.path()); }), ErrorCode::conflict);
    remove_abandoned(directory.path());
    EXPECT_TRUE(fs::exists(directory.path()));
  }
  const LockedFd again = locked_directory(directory.path());
  EXPECT_EQ(code_of([&] { (void)locked_directory(directory.path() + "/none"); }),
            ErrorCode::not_found);
}

namespace fs = std::filesystem;

void write(const std::string& path, const std::string& text) {
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(path) << text;
}

std::string text_in(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::size_t entries(const std::string& directory) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(directory), fs::directory_iterator()));
}

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  throw std::runtime_error("expected an Error");
}

TEST(ReplacedDirectory, AppearsAtCommitOnly) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/a/step1";
  ReplacedDirectory target(path + "/", IfExists::fail);
  write(target.working() + "/model/rank0.pt", "new");
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(target.working().starts_with(path + "-tmp-"));
  target.commit();
  EXPECT_EQ(text_in(path + "/model/rank0.pt"), "new");
  EXPECT_EQ(entries(directory.path() + "/a"), 1U);
  EXPECT_EQ(code_of([&] { target.commit(); }), ErrorCode::invalid_argument);
}

TEST(ReplacedDirectory, WithoutCommitNothingChanges) {
  const TemporaryDirectory directory;
  write(directory.path() + "/step1/old", "old");
  {
    const ReplacedDirectory target(directory.path() + "/step1", IfExists::replace);
    write(target.working() + "/new", "new");
  }
  EXPECT_EQ(entries(directory.path()), 1U);
  EXPECT_EQ(text_in(directory.path() + "/step1/old"), "old");
}

TEST(ReplacedDirectory, WhatAKilledProcessLeftIsRemovedByTheNext) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/d";
  const std::string left = path + "-tmp-0123456789ab";
  write(left + "/half", "half");
  write(path + "-tmp-0123456789ag/other", "not ours");
  const ReplacedDirectory first(path, IfExists::fail);
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(path + "-tmp-0123456789ag"));
  const ReplacedDirectory second(path, IfExists::fail);
  EXPECT_TRUE(std::filesystem::exists(first.working()));
}

TEST(ReplacedDirectory, ReplacesTheWholeDirectory) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/step1";
  write(path + "/model/old", "old");
  ReplacedDirectory target(path, IfExists::replace);
  write(target.working() + "/new", "new");
  EXPECT_EQ(text_in(path + "/model/old"), "old");
  target.commit();
  EXPECT_EQ(text_in(path + "/new"), "new");
  EXPECT_FALSE(fs::exists(path + "/model"));
  EXPECT_EQ(entries(directory.path()), 1U);
}

TEST(ReplacedDirectory, WhatIsNotReplacedIsThereBeforeAndAfter) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/step1";
  for (const char* name : {"model/old", "old", "notes.txt", "eval/a/result", "model/notes", "same"})
    write(path + "/" + name, name);
  fs::create_symlink("notes.txt", path + "/link");
  fs::create_directory(path + "/empty");
  fs::permissions(path + "/eval", fs::perms(0750));
  const auto is_replaced = [](std::string_view name) { return name.ends_with("old"); };
  ReplacedDirectory target(path, IfExists::replace);
  write(target.working() + "/new", "new");
  write(target.working() + "/same", "new");
  const auto inode = [&](const char* name) {
    struct stat status {};
    EXPECT_EQ(::lstat((path + "/" + name).c_str(), &status), 0) << name;
    return status.st_ino;
  };
  const auto notes = inode("notes.txt");
  target.commit(is_replaced);
  for (const char* name : {"notes.txt", "eval/a/result", "model/notes"})
    EXPECT_EQ(text_in(path + "/" + name), name);
  EXPECT_EQ(inode("notes.txt"), notes);  // a writer that has it open goes on with the same file
  EXPECT_EQ(fs::read_symlink(path + "/link"), "notes.txt");
  EXPECT_TRUE(fs::is_directory(path + "/empty"));
  EXPECT_EQ(fs::status(path + "/eval").permissions(), fs::perms(0750));
  EXPECT_EQ(text_in(path + "/new") + text_in(path + "/same"), "newnew");
  EXPECT_FALSE(fs::exists(path + "/old"));
  EXPECT_FALSE(fs::exists(path + "/model/old"));
  EXPECT_EQ(entries(directory.path()), 1U);
}

TEST(ReplacedDirectory, WithoutCommitWhatIsNotReplacedStays) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/step1";
  write(path + "/notes", "mine");
  { const ReplacedDirectory target(path, IfExists::replace); }
  EXPECT_EQ(text_in(path + "/notes"), "mine");
}

TEST(ReplacedDirectory, WhatIsThereIsKept) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/step1";
  write(path + "/old", "old");
  EXPECT_EQ(code_of([&] { ReplacedDirectory(path, IfExists::fail); }), ErrorCode::already_exists);
  write(directory.path() + "/file", "old");
  for (const IfExists if_exists : {IfExists::fail, IfExists::replace}) {
    EXPECT_EQ(code_of([&] { ReplacedDirectory(directory.path() + "/file", if_exists); }),
              ErrorCode::already_exists);
  }
  EXPECT_EQ(entries(directory.path()), 2U);
}

// O-30: a directory without entries does not count. One that gets entries meanwhile does.
TEST(ReplacedDirectory, AnEmptyDirectoryIsTaken) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/step1";
  fs::create_directory(path);
  {
    ReplacedDirectory target(path, IfExists::fail);
    write(target.working() + "/new", "new");
    write(path + "/other", "other");
    EXPECT_EQ(code_of([&] { target.commit(); }), ErrorCode::already_exists);
  }
  EXPECT_EQ(text_in(path + "/other"), "other");
  fs::remove(path + "/other");
  ReplacedDirectory target(path, IfExists::fail);
  write(target.working() + "/new", "new");
  target.commit();
  EXPECT_EQ(text_in(path + "/new"), "new");
}

TEST(ReplacedDirectory, SomebodyElseWasFaster) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/step1";
  ReplacedDirectory target(path, IfExists::fail);
  write(target.working() + "/new", "new");
  write(path + "/other", "other");
  EXPECT_EQ(code_of([&] { target.commit(); }), ErrorCode::already_exists);
  EXPECT_EQ(text_in(path + "/other"), "other");
}

TEST(ReplacedDirectory, InTwoStepsWhereNamesCannotBeExchanged) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/step1";
  write(path + "/old", "old");
  write(path + "-tmp-1/new", "new");
  const std::string aside = exchange_in_two_steps(path + "-tmp-1", path);
  EXPECT_EQ(text_in(path + "/new"), "new");
  EXPECT_EQ(text_in(aside + "/old"), "old");
  EXPECT_TRUE(aside.starts_with(path + ".old-"));
  // Killed between the two steps: the old one is found under its other name.
  fs::remove_all(path);
  EXPECT_EQ(replaced_directory_of(path), aside);
  EXPECT_EQ(replaced_directory_of(path + "2"), "");
  fs::create_directory(path + ".old-2");
  EXPECT_EQ(replaced_directory_of(path), "");
}

// Who looks for a checkpoint there hears that there is none.
TEST(ReplacedDirectory, NothingIsFoundWhereEntriesCannotBeRead) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory.path() + "/x.old-0123456789ab");
  EXPECT_FALSE(replaced_directory_of(directory.path() + "/x").empty());
  std::filesystem::permissions(directory.path(), std::filesystem::perms::owner_exec);
  const uid_t before = ::geteuid();
  if (before == 0) {
    ASSERT_EQ(::chown(directory.path().c_str(), 12345, 12345), 0);
    ASSERT_EQ(::seteuid(12345), 0);
  }
  EXPECT_TRUE(replaced_directory_of(directory.path() + "/x").empty());
  ASSERT_EQ(::seteuid(before), 0);
  std::filesystem::permissions(directory.path(), std::filesystem::perms::owner_all);
}

TEST(ReplacedDirectory, WhatIsReplacedGivesItsMode) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  const auto mode_of = [](const std::string& of) { return fs::status(of).permissions(); };
  for (const auto mode :
       {fs::perms::owner_all, fs::perms(0750), fs::perms(02775), fs::perms(0555)}) {
    if (mode == fs::perms(0555) && ::geteuid() != 0) continue;  // nobody else empties the old one
    fs::create_directories(path);
    std::ofstream(path + "/old") << "old";
    fs::permissions(path, mode);
    ReplacedDirectory replaced(path, IfExists::replace);
    EXPECT_EQ(mode_of(replaced.working()), mode | fs::perms::owner_all);
    std::ofstream(replaced.working() + "/new") << "new";
    replaced.commit();
    EXPECT_EQ(mode_of(path), mode | fs::perms::owner_all);
    EXPECT_TRUE(fs::exists(path + "/new"));
  }
}

TEST(WorkDirectory, IsLeftForTheNextOne) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/a/.x.resume";
  {
    const WorkDirectory work(path);
    std::filesystem::create_directories(work.content() + "/b");
    std::ofstream(path + "/note") << "one";
  }
  WorkDirectory work(path);
  EXPECT_TRUE(std::filesystem::exists(work.content() + "/b"));
  EXPECT_TRUE(std::filesystem::exists(path + "/note"));
  work.remove();
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/a"));
}

TEST(WorkDirectory, OneWorksAtATime) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/.x.resume";
  {
    const WorkDirectory work(path);
    EXPECT_EQ(code_of([&] { const WorkDirectory other(path); }), ErrorCode::conflict);
  }
  EXPECT_NO_THROW(WorkDirectory{path});
}

TEST(WorkDirectory, WhatIsNotADirectoryOfOursStays) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/.x.resume";
  std::ofstream(path) << "mine";
  EXPECT_EQ(code_of([&] { const WorkDirectory work(path); }), ErrorCode::unsafe);
  std::filesystem::remove(path);
  std::filesystem::create_directory(directory.path() + "/other");
  std::filesystem::create_symlink("other", path);
  EXPECT_EQ(code_of([&] { const WorkDirectory work(path); }), ErrorCode::unsafe);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/other"));
}

TEST(WorkDirectory, WhatIsAnothersStays) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/.x.resume";
  std::filesystem::create_directory(path);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  EXPECT_EQ(code_of([&] { const WorkDirectory work(path); }), ErrorCode::unsafe);
  EXPECT_TRUE(std::filesystem::is_empty(path));
}

}  // namespace
}  // namespace tessera
