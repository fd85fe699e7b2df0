// Locks across hosts and forks. The calls below stand in the place of the
// system's: as NFS has them, a lock of a file that is open for reading alone is EBADF, and one of a
// directory does not reach other hosts.
#include "storage/posix/lock.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "conformance/unprivileged.h"
#include "storage/posix/atomic_file.h"
#include "storage/posix/replaced_directory.h"
#include "tessera/error.h"
#include "tessera/storage.h"

namespace {

enum class FileSystem { local, nfs, without_locks, fuse };
std::atomic<FileSystem> file_system = FileSystem::local;

bool is_directory(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
}

}  // namespace

extern "C" int flock(int fd, int operation) {
  const bool takes = (operation & LOCK_UN) == 0;
  if (takes && file_system == FileSystem::without_locks) {
    errno = ENOLCK;
    return -1;
  }
  if (takes && file_system == FileSystem::nfs && (operation & LOCK_EX) != 0 && !is_directory(fd) &&
      (::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) {
    errno = EBADF;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_flock, fd, operation));
}

extern "C" int statfs(const char* path, struct statfs* system) {
  const int result = static_cast<int>(::syscall(SYS_statfs, path, system));
  if (file_system == FileSystem::fuse) system->f_type = FUSE_SUPER_MAGIC;
  return result;
}

extern "C" int fstatfs(int fd, struct statfs* system) {
  const int result = static_cast<int>(::syscall(SYS_fstatfs, fd, system));
  if (file_system == FileSystem::nfs) system->f_type = NFS_SUPER_MAGIC;
  if (file_system == FileSystem::fuse) system->f_type = FUSE_SUPER_MAGIC;
  return result;
}

namespace tessera {
namespace {

namespace fs = std::filesystem;

class Locks : public ::testing::Test {
 protected:
  ~Locks() override { file_system = FileSystem::local; }

  [[nodiscard]] std::string in(const std::string& name) const {
    return directory_.path() + "/" + name;
  }
  [[nodiscard]] std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(directory_.path()), fs::directory_iterator()));
  }

  TemporaryDirectory directory_;
};

// A file of a writer that lives, and one of a writer that was killed.
TEST_F(Locks, AnUnfinishedFileGoesOnlyWhenItsWriterIsSurelyGone) {
  for (const FileSystem kind : {FileSystem::local, FileSystem::nfs, FileSystem::without_locks}) {
    file_system = kind;
    AtomicFile living(in("x.pt"), IfExists::fail, 0, UntilCommit::temporary_name);
    const std::string left = in(".x.pt.tmp-0123456789ab");
    ASSERT_TRUE(Fd(::open(left.c_str(), O_WRONLY | O_CREAT, 0600)));
    ASSERT_EQ(files(), 2U);
    posix_store(directory_.path())->remove_unfinished();
    EXPECT_EQ(fs::exists(left), kind == FileSystem::without_locks);
    living.write_at(0, {});
    living.commit();
    fs::remove(left);
    fs::remove(in("x.pt"));
  }
}

// An unfinished file has the mode of what it is to replace.
TEST_F(Locks, WhatMayNotBeWrittenIsAskedForAllTheSame) {
  const std::string left = in(".x.pt.tmp-0123456789ab");
  ASSERT_TRUE(Fd(::open(left.c_str(), O_WRONLY | O_CREAT, 0400)));
  Unprivileged::give(left);
  Unprivileged::give(directory_.path());
  {
    const Unprivileged unprivileged;
    EXPECT_EQ(is_free(left), Locked::yes);
    file_system = FileSystem::nfs;
    EXPECT_EQ(is_free(left), Locked::unknown);
    file_system = FileSystem::local;
  }
  remove_abandoned(left);  // root's, too
  EXPECT_FALSE(fs::exists(left));
}

TEST_F(Locks, ADirectoryThatAnotherHostMayWriteIntoStays) {
  for (const FileSystem kind : {FileSystem::local, FileSystem::nfs, FileSystem::without_locks}) {
    file_system = kind;
    const std::string left = in("step1-tmp-0123456789ab");
    fs::create_directory(left);
    {
      const ReplacedDirectory made(in("step1"), IfExists::fail);
      EXPECT_EQ(fs::exists(left), kind != FileSystem::local);
      EXPECT_EQ(is_free(made.working()),
                kind == FileSystem::without_locks ? Locked::unknown : Locked::no);
    }
    EXPECT_EQ(remove_free(left, false), kind == FileSystem::local);
    EXPECT_TRUE(remove_free(left, true));
    EXPECT_EQ(files(), 0U);
  }
}

// One in user space gives a file another number when it is asked again.
TEST_F(Locks, AFileInUserSpaceIsKnownByItsSizeAndTime) {
  const auto store = posix_store(directory_.path());
  put(*store, "x", std::vector<std::byte>(5), IfExists::fail);
  const auto write_again = [&] {  // with the same size and time, and another number
    const auto time = fs::last_write_time(in("x"));
    put(*store, "x", std::vector<std::byte>(5), IfExists::replace);
    fs::last_write_time(in("x"), time);
  };
  ObjectInfo listed = store->list().front();
  write_again();
  EXPECT_EQ(code_of([&] { (void)store->open_listed(listed); }), ErrorCode::conflict);
  file_system = FileSystem::fuse;
  listed = store->list().front();
  write_again();
  EXPECT_EQ(store->open_listed(listed)->size(), 5U);
  put(*store, "x", std::vector<std::byte>(6), IfExists::replace);
  EXPECT_EQ(code_of([&] { (void)store->open_listed(listed); }), ErrorCode::conflict);
}

// A child that lives until this ends, and does `work` first.
class Child {
 public:
  explicit Child(const std::function<void()>& work = [] {}) {
    int ends[2], said[2];
    if (::pipe(ends) != 0 || ::pipe(said) != 0) throw std::runtime_error("pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[1]);
      work();
      char byte = 0;
      (void)!::write(said[1], &byte, 1);
      ::_exit(static_cast<int>(::read(ends[0], &byte, 1)));
    }
    ::close(ends[0]);
    ends_ = Fd(ends[1]);
    char byte = 0;
    (void)!::read(said[0], &byte, 1);
    ::close(said[0]);
    ::close(said[1]);
  }
  ~Child() {
    ends_ = Fd();
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  Fd ends_;
};

TEST_F(Locks, AChildThatLivesKeepsNoLock) {
  const auto store = posix_store(directory_.path());
  auto hold = store->hold();
  const Child child;
  EXPECT_EQ(code_of([&] { (void)store->hold(); }), ErrorCode::conflict);
  hold.reset();
  EXPECT_NO_THROW((void)store->hold());
}

TEST_F(Locks, AChildEndsNoLockAndRemovesNothingOfItsParents) {
  const std::string path = directory_.path();
  auto lock = std::make_unique<LockedFd>(locked_directory(path));
  auto made = std::make_unique<ReplacedDirectory>(in("step1"), IfExists::fail);
  auto file =
      std::make_unique<AtomicFile>(in("x.pt"), IfExists::fail, 0, UntilCommit::temporary_name);
  const std::size_t before = files();
  const Child child([&] {
    lock.reset();
    made.reset();
    file.reset();
  });
  EXPECT_EQ(code_of([&] { (void)locked_directory(path); }), ErrorCode::conflict);
  EXPECT_EQ(files(), before);
}

// The writer has the lock and is gone; its child, which has a copy, still runs.
TEST_F(Locks, ALockEndsWithItsProcessWhateverChildrenThatHas) {
  const std::string path = directory_.path();
  int ends[2], said[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::pipe(said), 0);
  const pid_t writer = ::fork();
  if (writer == 0) {
    const LockedFd lock = locked_directory(path);
    char byte = 0;
    if (::fork() == 0) {
      ::close(ends[1]);
      (void)!::write(said[1], &byte, 1);
      ::_exit(static_cast<int>(::read(ends[0], &byte, 1)));
    }
    (void)!::read(said[0], &byte, 1);  // the grandchild runs
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(writer, nullptr, 0), writer);
  EXPECT_NO_THROW((void)locked_directory(path));
  for (const int end : {ends[0], ends[1], said[0], said[1]}) ::close(end);
}

}  // namespace
}  // namespace tessera
