#include "storage/posix/replaced_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/process.h"
#include "base/text.h"
#include "storage/posix/lock.h"
#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {

NewDirectories::NewDirectories(const std::string& path) {
  std::filesystem::path directory(path);
  if (!directory.has_filename()) directory = directory.parent_path();
  struct stat status {};
  while (!directory.empty() && ::lstat(directory.c_str(), &status) != 0) {
    missing_.push_back(directory.string());
    const std::filesystem::path parent = directory.parent_path();
    if (parent == directory) break;
    directory = parent;
  }
}

NewDirectories::~NewDirectories() {
  if (!made_here_) return;
  for (const std::string& directory : missing_) ::rmdir(directory.c_str());
}

namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT) throw_errno(errno, "look for", path);
  return false;
}

// A plain rename takes the place of an empty directory, and of no other; without `empty_too` of
// none, where the file system can promise that.
void rename_to(const std::string& from, const std::string& to, bool empty_too) {
  const unsigned flags = empty_too ? 0U : RENAME_NOREPLACE;
  const auto moved = id_of(from);
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0) return;
  const bool no_such_flag = flags != 0 && lacks_flag(errno);
  if (no_such_flag && ::rename(from.c_str(), to.c_str()) == 0) return;
  const int error = errno;
  if (error == ENOENT && is_at(moved, to)) return;
  throw_errno(error == ENOTEMPTY ? EEXIST : error, "rename into place", to);
}

constexpr const char* kKeep = "keep what is no part of the checkpoint";

// The file gets the second name `to`, if that is free. What cannot have a second name is copied, if
// it can be read.
void keep_file(const std::string& from, const std::string& to) {
  if (is_there(to) || ::linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), 0) == 0) return;
  const int reason = errno;
  // It was made and says that it was not (fault-rows F20), or somebody has just removed the file.
  if (is_there(to) || (reason == ENOENT && !is_there(from))) return;
  std::error_code error;
  const bool may_copy = is_one_of(reason, EPERM, EXDEV, EMLINK, EOPNOTSUPP, ENOSYS) &&
                        fs::is_regular_file(fs::symlink_status(from, error));
  if (!may_copy) throw_errno(reason, kKeep, from);
  if (!fs::copy_file(from, to, error)) throw_errno(error.value(), kKeep, from);
  sync_open(opened(to, O_RDONLY).get(), to);
}

void keep_directory(const std::string& from, const std::string& to) {
  if (::mkdir(to.c_str(), 0777) == 0) {
    take_access_of(from, to);
  } else if (errno != EEXIST) {
    throw_errno(errno, kKeep, from);
  }
}

// Whether there is anything below the directory that is not replaced; an empty one counts.
bool has_others(const std::string& directory, const std::string& below,
                const NewDirectory::IsReplaced& is_replaced) {
  const std::vector<DirectoryEntry> entries = entries_of(directory);
  return entries.empty() || std::ranges::any_of(entries, [&](const DirectoryEntry& entry) {
           const std::string name = below + entry.name;
           return entry.is_directory ? has_others(entry.path, name + "/", is_replaced)
                                     : !is_replaced(name);
         });
}

// Gives what is not replaced the same place below `to`, where that has nothing of that name.
void keep_others(const std::string& from, const std::string& to, const std::string& below,
                 const NewDirectory::IsReplaced& is_replaced) {
  for (const DirectoryEntry& entry : entries_of(from)) {
    const std::string name = below + entry.name;
    const std::string there = to + "/" + entry.name;
    if (!entry.is_directory) {
      if (!is_replaced(name)) keep_file(entry.path, there);
      continue;
    }
    if (!has_others(entry.path, name + "/", is_replaced)) continue;
    keep_directory(entry.path, there);
    keep_others(entry.path, there, name + "/", is_replaced);
  }
}

void sync_tree(const std::string& directory) {
  for (const DirectoryEntry& entry : entries_of(directory))
    if (entry.is_directory) sync_tree(entry.path);
  sync_directory(directory);
}

}  // namespace

bool is_working_name(std::string_view name, std::string_view of) {
  const std::size_t at = name.rfind(kWorkMark);
  if (at == std::string_view::npos || at == 0) return false;
  return is_attempt(name.substr(at + kWorkMark.size())) && (of.empty() || name.substr(0, at) == of);
}

ReplacedDirectory::ReplacedDirectory(const std::string& path, IfExists if_exists)
    : path_(without_slashes(path)), if_exists_(if_exists) {
  require_room();
  make_directories(directory_of(path_));
  remove_abandoned_attempts(directory_of(path_),
                            fs::path(path_).filename().string() + std::string(kWorkMark),
                            fs::file_type::directory);
  while (!lock_) make_sibling();
  take_access_of(path_, working_);
  is_ours_ = true;
}

// Without a lock afterwards: somebody took the new directory for an abandoned one.
void ReplacedDirectory::make_sibling() {
  const std::string working = path_ + std::string(kWorkMark) + random_attempt();
  if (::mkdir(working.c_str(), 0777) != 0) throw_errno(errno, "make directory", working);
  working_ = working;
  Fd fd = opened(working, O_RDONLY | O_DIRECTORY);
  if (!fd && errno != ENOENT) throw_errno(errno, "open directory", working);
  if (fd && try_lock(fd.get()) != Locked::no && is_there(working)) lock_ = LockedFd(std::move(fd));
}

ReplacedDirectory::ReplacedDirectory(const std::string& path, IfExists if_exists,
                                     std::string working)
    : path_(without_slashes(path)), if_exists_(if_exists), working_(std::move(working)) {
  require_room();
}

void ReplacedDirectory::require_room() const {
  if (!is_there(path_)) return;
  std::error_code error;
  const bool directory = fs::is_directory(fs::symlink_status(path_, error));
  if (directory && (if_exists_ == IfExists::replace || fs::is_empty(path_, error))) return;
  throw Error(ErrorCode::already_exists, directory
                                             ? "a directory with files in it is there already"
                                             : "something that is not a directory is there already")
      .at_path(path_);
}

ReplacedDirectory::~ReplacedDirectory() {
  if (!is_ours_ || working_.empty() || !made_here_) return;
  try {
    remove_all(working_);
  } catch (const std::exception&) {
    return;  // memory may be short, too; the next one removes it
  }
}

void ReplacedDirectory::commit(const NewDirectory::IsReplaced& is_replaced) {
  if (working_.empty())
    throw Error(ErrorCode::invalid_argument, "already committed").at_path(path_);
  require_untouched();
  const bool keeps = is_replaced && if_exists_ == IfExists::replace && is_there(path_);
  if (keeps) keep_others(path_, working_, "", is_replaced);
  take_access_of(path_, working_);
  sync_tree(working_);
  if (is_there(path_)) {
    if (if_exists_ == IfExists::replace) {
      exchange(is_replaced);
      return;
    }
    rename_to(working_, path_, true);
  } else {
    rename_to(working_, path_, false);
  }
  working_.clear();
  sync_directory(directory_of(path_));
}

// Who writes into a sibling that somebody has deleted makes it again, without what was in it.
void ReplacedDirectory::require_untouched() const {
  if (!is_ours_ || is_at(id_of(lock_.get()), working_)) return;
  throw Error(ErrorCode::conflict, "the directory was deleted while files were written into it")
      .at_path(working_);
}

void ReplacedDirectory::exchange(const NewDirectory::IsReplaced& is_replaced) {
  std::string old = working_;
  const auto moved = id_of(working_);
  if (::renameat2(AT_FDCWD, working_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) != 0) {
    const int error = errno;
    const bool is_done = error == ENOENT && is_at(moved, path_);
    if (!lacks_flag(error) && !is_done) throw_errno(error, "exchange with", path_);
    if (!is_done) old = exchange_in_two_steps(working_, path_);
  }
  working_.clear();
  sync_directory(directory_of(path_));
  if (is_replaced) {  // what came since
    keep_others(old, path_, "", is_replaced);
    sync_tree(path_);
  }
  remove_all(old);
}

std::string exchange_in_two_steps(const std::string& new_path, const std::string& old_path) {
  const std::string aside = old_path + std::string(kOldMark) + random_attempt();
  rename_to(old_path, aside, false);
  sync_directory(directory_of(old_path));
  rename_to(new_path, old_path, false);
  return aside;
}

std::string replaced_directory_of(const std::string& path) {
  const std::string plain = without_slashes(path);
  const std::string start = fs::path(plain).filename().string() + std::string(kOldMark);
  std::vector<std::string> found;
  for (const DirectoryEntry& entry : readable_entries_of(directory_of(plain)))
    if (entry.name.starts_with(start) && entry.is_directory) found.push_back(entry.path);
  return found.size() == 1 ? found.front() : std::string();
}

namespace {

namespace fs = std::filesystem;

void require_ours(const std::string& path, const struct stat& status) {
  if (!S_ISDIR(status.st_mode)) {
    throw Error(ErrorCode::unsafe, "something is where unfinished work is kept").at_path(path);
  }
  if (status.st_uid != ::geteuid() && status.st_uid != owner_of_ours(path)) {
    throw Error(ErrorCode::unsafe, "unfinished work of another user is in the way").at_path(path);
  }
}

void make_own_directory(const std::string& path) {
  make_directories(fs::path(path).parent_path().string());
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    throw_errno(errno, "make directory", path);
  }
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;  // its owner is done: the next turn makes it
    throw_errno(errno, "look for", path);
  }
  require_ours(path, status);
}

constexpr std::string_view kLockText = "of tessera: unfinished work\n";

// None when the directory has gone.
Fd open_lock(const std::string& path) {
  Fd fd = opened(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK);
  if (!fd && errno != ENOENT) throw_errno(errno, "open", path);
  return fd;
}

void lock_alone(const Fd& fd, const std::string& directory) {
  const Locked locked = try_lock(fd.get());
  if (locked == Locked::yes) return;
  if (locked == Locked::unknown) throw_errno(errno, "lock", directory);
  throw Error(ErrorCode::conflict, "another process works on the same target").at_path(directory);
}

// None when the process that had the lock until now has removed it.
LockedFd lock_work(const std::string& directory) {
  const std::string path = directory + "/" + std::string(kWorkLock);
  Fd fd = open_lock(path);
  if (!fd) return {};
  lock_alone(fd, directory);
  struct stat open {};
  if (::fstat(fd.get(), &open) != 0) throw_errno(errno, "stat", path);
  if (!S_ISREG(open.st_mode)) {
    throw Error(ErrorCode::unsafe, "the lock is not a regular file").at_path(path);
  }
  // Where there is no room for it the work itself says so.
  if (open.st_size == 0) (void)!::pwrite(fd.get(), kLockText.data(), kLockText.size(), 0);
  return is_at(id_of(fd.get()), path) ? LockedFd(std::move(fd)) : LockedFd();
}

}  // namespace

bool is_work_directory(const std::string& path) {
  const Fd fd = opened(path + "/" + std::string(kWorkLock), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  std::array<char, kLockText.size() + 1> text{};
  return fd && ::pread(fd.get(), text.data(), text.size(), 0) == std::ssize(kLockText) &&
         std::string_view(text.data(), kLockText.size()) == kLockText;
}

WorkDirectory::WorkDirectory(std::string path) : path_(std::move(path)), content_(path_ + "/new") {
  while (!lock_) {
    make_own_directory(path_);
    lock_ = lock_work(path_);
  }
}

void WorkDirectory::clear() {
  std::vector<DirectoryEntry> entries = entries_of(path_);
  std::ranges::sort(entries, {}, &DirectoryEntry::name);
  for (const DirectoryEntry& entry : entries)
    if (entry.name != kWorkLock) remove_all(entry.path);
}

void WorkDirectory::remove() {
  clear();
  ::unlink((path_ + "/" + std::string(kWorkLock)).c_str());
  ::rmdir(path_.c_str());
}

}  // namespace tessera
