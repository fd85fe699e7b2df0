#include "storage/posix/atomic_file.h"

#include <fcntl.h>
#include <linux/posix_acl.h>
#include <linux/posix_acl_xattr.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>
#include <vector>

#include "conformance/errors.h"
#include "conformance/store_conformance.h"
#include "conformance/temporary_directory.h"
#include "conformance/unprivileged.h"
#include "storage/posix/system.h"

namespace tessera {
namespace {

std::string content(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Files may not grow past `bytes` while this lives; the signal that comes with it is ignored.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  void (*old_handler_)(int);
  rlimit old_{};
};

TEST(AtomicFile, TheNameAppearsAtCommitOnly) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/a/b/x";
  {
    AtomicFile file(path, IfExists::fail, 0);
    file.write_at(0, bytes_of("abc"));
    EXPECT_FALSE(std::filesystem::exists(path));
    file.commit();
  }
  EXPECT_EQ(content(path), "abc");
  const auto entries = std::filesystem::directory_iterator(directory.path() + "/a/b");
  EXPECT_EQ(std::distance(begin(entries), end(entries)), 1);
}

TEST(AtomicFile, TemporariesAreToldByTheirName) {
  EXPECT_TRUE(is_temporary_name(".x.tmp-0123456789ab"));
  EXPECT_TRUE(is_temporary_name("..metadata.tmp-0123456789ab"));
  for (const char* name :
       {".metadata", ".metadata.tmp", "x.tmp-0123456789ab", ".tmp-0123456789ab",
        ".x.tmp-0123456789a", ".x.tmp-0123456789aB", ".x.tmp-0123456789ab.distcp"}) {
    EXPECT_FALSE(is_temporary_name(name)) << name;
  }
  const TemporaryDirectory directory;
  const AtomicFile file(directory.path() + "/x", IfExists::fail, 0, UntilCommit::temporary_name);
  EXPECT_FALSE(directory.empty());
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    EXPECT_TRUE(is_temporary_name(entry.path().filename().native())) << entry.path();
  }
}

// What a process leaves that is killed while it writes: nothing where files may be without a name.
void die_while_writing(const std::string& path, UntilCommit until_commit) {
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile file(path, IfExists::replace, 0, until_commit);
    file.write_at(0, bytes_of("half"));
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
}

TEST(AtomicFile, AKilledWriterLeavesNothingOrWhatTheNextOneRemoves) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  die_while_writing(path, UntilCommit::unnamed_if_possible);
  EXPECT_TRUE(directory.empty());
  die_while_writing(path, UntilCommit::temporary_name);
  EXPECT_FALSE(directory.empty());
  {
    // One that is still written stays.
    AtomicFile other(path, IfExists::fail, 0, UntilCommit::temporary_name);
    remove_abandoned_temporaries(path);
    other.write_at(0, bytes_of("whole"));
    other.commit();
  }
  EXPECT_EQ(content(path), "whole");
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    files += entry.exists() ? 1 : 0;
  }
  EXPECT_EQ(files, 1U);
}

// Another process may look for what killed ones left between the making of a file and its lock.
TEST(AtomicFile, NobodyRemovesAFileThatIsNotLockedYet) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  std::atomic<int> writing = 4;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 500; ++turn) {
        EXPECT_NO_THROW({
          AtomicFile file(path, IfExists::replace, 0, UntilCommit::temporary_name);
          file.commit();
        });
      }
      --writing;
    });
  }
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (writing > 0) remove_abandoned_temporaries(path);
    });
  }
  threads.clear();
  std::filesystem::remove(path);
  EXPECT_TRUE(directory.empty());
}

TEST(AtomicFile, BothWaysToCommitReplaceOrRefuse) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  for (const UntilCommit until : {UntilCommit::unnamed_if_possible, UntilCommit::temporary_name}) {
    for (const char* text : {"first", "second"}) {
      AtomicFile file(path, IfExists::replace, 0, until);
      file.write_at(0, bytes_of(text));
      file.commit();
      EXPECT_EQ(content(path), text);
    }
    std::filesystem::remove(path);
    AtomicFile late(path, IfExists::fail, 0, until);
    AtomicFile first(path, IfExists::fail, 0, until);
    first.commit();
    EXPECT_EQ(code_of([&] { late.commit(); }), ErrorCode::already_exists);
    std::filesystem::remove(path);
  }
  EXPECT_TRUE(directory.empty());
}

TEST(AtomicFile, AReservationLeavesNoTrace) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  AtomicFile file(path, IfExists::fail, 1 << 20);
  file.write_at(0, bytes_of("abc"));
  file.commit();
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 3);
  EXPECT_LT(status.st_blocks * 512, 1 << 20);
}

// 15 MiB, not in order: write-back is started along the way and changes nothing.
TEST(AtomicFile, LargeWritesArrive) {
  const TemporaryDirectory directory;
  constexpr std::size_t kPart = 5 << 20;
  AtomicFile file(directory.path() + "/x", IfExists::fail, 0);
  std::string expected(3 * kPart, ' ');
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<char>(i * i >> 7);
  for (const std::size_t part : {2, 0, 1}) {
    file.write_at(part * kPart, bytes_of(expected).subspan(part * kPart, kPart));
  }
  file.commit();
  EXPECT_TRUE(content(file.name()) == expected);
}

// F08: EFBIG is an error as a full disk is, and nothing is left behind.
TEST(AtomicFile, AFailedWriteLeavesNothing) {
  const TemporaryDirectory directory;
  const FileSizeLimit limit(1000);
  {
    AtomicFile file(directory.path() + "/x", IfExists::fail, 0);
    file.write_at(0, bytes_of(std::string(900, 'x')));
    const Error error = error_of([&] { file.write_at(900, bytes_of(std::string(900, 'x'))); });
    EXPECT_EQ(error.code(), ErrorCode::out_of_space);
    EXPECT_NE(std::string(error.what()).find("1000 bytes of a file (ulimit -f)"), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(directory.empty());
}

struct stat status_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status;
}

// Who may not read the old file shall not read the new one, also while it is written.
TEST(AtomicFile, WhatIsReplacedGivesItsModeAndOwner) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  const bool is_root = ::geteuid() == 0;
  for (const auto until : {UntilCommit::unnamed_if_possible, UntilCommit::temporary_name}) {
    for (const mode_t mode : {0600U, 0640U, 0664U, 0444U, 0755U}) {
      put(*posix_store(directory.path()), "x", bytes_of("old"), IfExists::replace);
      ASSERT_EQ(::chmod(path.c_str(), mode), 0);
      const uid_t user = is_root ? 12345 : ::geteuid();
      const gid_t group = is_root ? 54321 : ::getegid();
      ASSERT_EQ(::chown(path.c_str(), user, group), 0);
      AtomicFile file(path, IfExists::replace, 0, until);
      file.write_at(0, bytes_of("new"));
      if (until == UntilCommit::temporary_name) {
        for (const DirectoryEntry& entry : entries_of(directory.path()))
          EXPECT_EQ(status_of(entry.path).st_mode & 07777U, mode) << entry.path;
      }
      file.commit();
      EXPECT_EQ(content(path), "new");
      EXPECT_EQ(status_of(path).st_mode & 07777U, mode);
      EXPECT_EQ(status_of(path).st_uid, user);
      EXPECT_EQ(status_of(path).st_gid, group);
    }
  }
}

struct AclEntry {
  unsigned tag, rights, id = 0xffffffffU;
};

// False: the file system has no ACLs.
bool set_acl(const std::string& path, const char* name, const std::vector<AclEntry>& entries) {
  std::vector<posix_acl_xattr_entry> raw;
  for (const auto& [tag, rights, id] : entries)
    raw.push_back({htole16(static_cast<std::uint16_t>(tag)),
                   htole16(static_cast<std::uint16_t>(rights)), htole32(id)});
  const posix_acl_xattr_header header{htole32(POSIX_ACL_XATTR_VERSION)};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.append(reinterpret_cast<const char*>(raw.data()), raw.size() * sizeof raw[0]);
  return ::setxattr(path.c_str(), name, bytes.data(), bytes.size(), 0) == 0;
}

constexpr const char* kAccessAcl = "system.posix_acl_access";
constexpr const char* kDefaultAcl = "system.posix_acl_default";

std::string acl_of(const std::string& path, const char* name) {
  std::string bytes(4096, '\0');
  const ssize_t size = ::getxattr(path.c_str(), name, bytes.data(), bytes.size());
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  return bytes;
}

// The group of the mode is the ACL's mask: a user whom it names may write, the group not even read.
TEST(AtomicFile, WhatIsReplacedGivesItsAcl) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  const std::vector<AclEntry> named = {
      {ACL_USER_OBJ, 6}, {ACL_USER, 6, 12345}, {ACL_GROUP_OBJ, 0}, {ACL_MASK, 6}, {ACL_OTHER, 0}};
  for (const auto until : {UntilCommit::unnamed_if_possible, UntilCommit::temporary_name}) {
    std::ofstream(path) << "old";
    if (!set_acl(path, kAccessAcl, named)) GTEST_SKIP() << "the file system has no ACLs";
    const std::string acl = acl_of(path, kAccessAcl);
    ASSERT_EQ(status_of(path).st_mode & 0777U, 0660U);
    AtomicFile file(path, IfExists::replace, 0, until);
    file.commit();
    EXPECT_EQ(acl_of(path, kAccessAcl), acl);
    EXPECT_EQ(status_of(path).st_mode & 0777U, 0660U);
  }
}

// Nor does it get what the directory gives to new files.
TEST(AtomicFile, WhatIsReplacedGivesThatItHasNoAcl) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  std::ofstream(path) << "old";
  ASSERT_EQ(::chmod(path.c_str(), 0660), 0);
  const std::vector<AclEntry> named = {
      {ACL_USER_OBJ, 7}, {ACL_USER, 7, 12345}, {ACL_GROUP_OBJ, 5}, {ACL_MASK, 7}, {ACL_OTHER, 5}};
  if (!set_acl(directory.path(), kDefaultAcl, named)) GTEST_SKIP() << "no ACLs here";
  for (const auto until : {UntilCommit::unnamed_if_possible, UntilCommit::temporary_name}) {
    AtomicFile file(path, IfExists::replace, 0, until);
    file.commit();
    EXPECT_EQ(acl_of(path, kAccessAcl), "");
    EXPECT_EQ(status_of(path).st_mode & 0777U, 0660U);
  }
}

// Who saves is not in the old file's group.
TEST(AtomicFile, AGroupThatIsNotTakenHasTheRightsOfOthers) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root becomes somebody else";
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x";
  Unprivileged::give(directory.path());
  for (const bool has_acl : {false, true}) {
    std::ofstream(path) << "old";
    ASSERT_EQ(::chmod(path.c_str(), 0664), 0);
    if (has_acl && !set_acl(path, kAccessAcl,
                            {{ACL_USER_OBJ, 6},
                             {ACL_USER, 6, 777},
                             {ACL_GROUP_OBJ, 6},
                             {ACL_MASK, 6},
                             {ACL_OTHER, 4}}))
      GTEST_SKIP() << "no ACLs here";
    ASSERT_EQ(::chown(path.c_str(), 54321, 54321), 0);
    {
      const gid_t before = ::getegid();
      ASSERT_EQ(::setegid(Unprivileged::kUser), 0);
      const Unprivileged unprivileged;
      AtomicFile file(path, IfExists::replace, 0);
      file.commit();
      ASSERT_EQ(::seteuid(0), 0);
      ASSERT_EQ(::setegid(before), 0);
    }
    EXPECT_NE(status_of(path).st_gid, 54321U);
    EXPECT_EQ(status_of(path).st_mode & 0777U, has_acl ? 0664U : 0644U);
    if (has_acl) {
      const std::string acl = acl_of(path, kAccessAcl);
      ASSERT_GT(acl.size(), 4U + 2 * 8);
      EXPECT_EQ(acl[4 + 2 * 8 + 2], 4);  // of the third entry, the group
    }
  }
}

// Links in a directory lead to what is not ours.
TEST(AtomicFile, ALinkInADirectoryIsReplacedItself) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() + "/theirs") << "theirs";
  ASSERT_EQ(::symlink("theirs", (directory.path() + "/x").c_str()), 0);
  put(*posix_store(directory.path()), "x", bytes_of("new"), IfExists::replace);
  EXPECT_EQ(content(directory.path() + "/theirs"), "theirs");
  EXPECT_EQ(content(directory.path() + "/x"), "new");
}

TEST(AtomicFile, LinksAreFollowedToWhereTheyLead) {
  const TemporaryDirectory directory;
  const std::string& root = directory.path();
  EXPECT_EQ(end_of_links(root + "/x"), root + "/x");
  ASSERT_EQ(::symlink("b/to", (root + "/a").c_str()), 0);
  ASSERT_EQ(::mkdir((root + "/b").c_str(), 0700), 0);
  EXPECT_EQ(end_of_links(root + "/a"), root + "/b/to");
  ASSERT_EQ(::symlink((root + "/there").c_str(), (root + "/b/to").c_str()), 0);
  EXPECT_EQ(end_of_links(root + "/a"), root + "/there");
  ASSERT_EQ(::symlink("a", (root + "/there").c_str()), 0);
  EXPECT_EQ(code_of([&] { (void)end_of_links(root + "/a"); }), ErrorCode::io);
}

// Directories of /proc cannot be synced, as those of vboxsf and 9p.
TEST(AtomicFile, DirectoriesThatCannotBeSyncedAreNoError_F23) {
  const Fd directory = opened("/proc", O_RDONLY | O_DIRECTORY);
  ASSERT_TRUE(directory);
  ASSERT_EQ(::fsync(directory.get()), -1);
  ASSERT_EQ(errno, EINVAL);
  EXPECT_NO_THROW(sync_directory("/proc"));
  EXPECT_EQ(code_of([] { sync_directory("/proc/none"); }), ErrorCode::not_found);
}

// A file system of 64 KiB, where this process may mount one.
class SmallDisk {
 public:
  SmallDisk() : mounted_(::mount("tmpfs", path().c_str(), "tmpfs", 0, "size=64k") == 0) {}
  ~SmallDisk() {
    if (mounted_) ::umount2(path().c_str(), MNT_DETACH);
  }
  [[nodiscard]] bool mounted() const { return mounted_; }
  [[nodiscard]] const std::string& path() const { return directory_.path(); }

 private:
  const TemporaryDirectory directory_;
  const bool mounted_;
};

// F06: a full disk is told by the first call that needs room, and gets its room back.
TEST(AtomicFile, AFullDiskIsOutOfSpace) {
  const SmallDisk disk;
  if (!disk.mounted()) GTEST_SKIP() << "no permission to mount";
  const std::string text(100'000, 'x');
  EXPECT_EQ(
      code_of([&] { const AtomicFile file(disk.path() + "/x", IfExists::fail, text.size()); }),
      ErrorCode::out_of_space);
  {
    AtomicFile file(disk.path() + "/x", IfExists::fail, 0);
    EXPECT_EQ(code_of([&] { file.write_at(0, bytes_of(text)); }), ErrorCode::out_of_space);
  }
  EXPECT_TRUE(std::filesystem::is_empty(disk.path()));
  AtomicFile file(disk.path() + "/x", IfExists::fail, 50'000);
  file.commit();
}

TEST(AtomicFile, OffsetsThatNoFileHasAreLimit) {
  const TemporaryDirectory directory;
  constexpr auto kMax = std::numeric_limits<std::uint64_t>::max();
  AtomicFile file(directory.path() + "/x", IfExists::fail, kMax);
  EXPECT_EQ(code_of([&] { file.write_at(kMax, bytes_of("xx")); }), ErrorCode::limit);
  EXPECT_EQ(code_of([&] { file.write_at(kMax / 2 + 1, bytes_of("xx")); }), ErrorCode::limit);
}

TEST(AtomicFile, LongNamesWorkUpToTheLimitOfTheFileSystem) {
  const TemporaryDirectory directory;
  AtomicFile file(directory.path() + "/" + std::string(255, 'x'), IfExists::fail, 0);
  file.commit();
  EXPECT_TRUE(std::filesystem::exists(file.name()));
  EXPECT_EQ(code_of([&] {
              const AtomicFile longer(directory.path() + "/" + std::string(256, 'x'),
                                      IfExists::replace, 0);
            }),
            ErrorCode::io);
}

TEST(AtomicFile, ADirectoryIsNotReplaced) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory.path() + "/x");
  {
    AtomicFile file(directory.path() + "/x", IfExists::replace, 0);
    EXPECT_EQ(code_of([&] { file.commit(); }), ErrorCode::io);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/x"));
  const auto entries = std::filesystem::directory_iterator(directory.path());
  EXPECT_EQ(std::distance(begin(entries), end(entries)), 1);
}

// F23: the way for file systems without RENAME_NOREPLACE.
TEST(AtomicFile, LinkingRefusesATakenName) {
  const TemporaryDirectory directory;
  const std::string from = directory.path() + "/from";
  const std::string to = directory.path() + "/to";
  std::ofstream(from) << "new";
  link_into_place(from, to);
  EXPECT_EQ(content(to), "new");
  EXPECT_FALSE(std::filesystem::exists(from));
  std::ofstream(from) << "newer";
  EXPECT_EQ(code_of([&] { link_into_place(from, to); }), ErrorCode::already_exists);
  EXPECT_EQ(content(to), "new");
}

TEST(System, ErrnoBecomesACode) {
  const auto code = [](int number) { return code_of([&] { throw_errno(number, "x", "p"); }); };
  EXPECT_EQ(code(ENOENT), ErrorCode::not_found);
  EXPECT_EQ(code(EEXIST), ErrorCode::already_exists);
  EXPECT_EQ(code(ENOSPC), ErrorCode::out_of_space);
  EXPECT_EQ(code(EDQUOT), ErrorCode::out_of_space);
  EXPECT_EQ(code(EIO), ErrorCode::io);
  EXPECT_EQ(code_of([] { sync_directory("/no/such/directory"); }), ErrorCode::not_found);
}

}  // namespace
}  // namespace tessera
