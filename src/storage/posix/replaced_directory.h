// Directories that are made for work which may fail: kept until it ends, resumed, or put in place
// of another.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/process.h"
#include "storage/posix/lock.h"
#include "tessera/storage.h"
#include "tessera/stores.h"

namespace tessera {

// Directories that are made for work which may fail.

class NewDirectories {
 public:
  // Notes which of `path` and the directories above it are not there yet; somebody else makes them.
  explicit NewDirectories(const std::string& path);
  NewDirectories(const NewDirectories&) = delete;
  NewDirectories& operator=(const NewDirectories&) = delete;
  // Removes those that were not there, as far as they are empty, unless the work was done.
  ~NewDirectories();
  void keep() noexcept { missing_.clear(); }

 private:
  MadeHere made_here_;
  std::vector<std::string> missing_;  // innermost first
};

// A directory that appears whole under its name, or not at all.
//
// Everything is written into a sibling, NAME-tmp-<attempt>; commit gives it the name. What had the
// name before stays whole until then and is removed afterwards. See docs/design/commit.md. Work
// that may be interrupted brings a working directory of its own (docs/design/resume.md).

// "NAME-tmp-<attempt>" of any name, or of this one.
[[nodiscard]] bool is_working_name(std::string_view name, std::string_view of = {});

class ReplacedDirectory {
 public:
  // Makes the sibling, and removes those that killed processes left. With IfExists::fail a file, or
  // a directory that is not empty, under the name is `already_exists`, checked again at commit;
  // with IfExists::replace a file is.
  ReplacedDirectory(const std::string& path, IfExists if_exists);
  // Takes the directory `working`, on the same file system, instead of a new sibling.
  ReplacedDirectory(const std::string& path, IfExists if_exists, std::string working);
  ReplacedDirectory(const ReplacedDirectory&) = delete;
  ReplacedDirectory& operator=(const ReplacedDirectory&) = delete;
  // Without commit the sibling is removed with all that is in it; a given directory stays.
  ~ReplacedDirectory();

  // The sibling: write here.
  [[nodiscard]] const std::string& working() const noexcept { return working_; }
  // Gives the sibling the mode of what has the name, makes all directories below durable (files
  // must be, as those of a posix store are), gives the sibling the name in one step, and removes
  // what had it before, but for what is not replaced (NewDirectory::IsReplaced): that gets a second
  // name in the sibling before that step, so that a crash at any moment leaves it in one of both;
  // where it cannot have two, it is copied. At most once. A failure before that step leaves the old
  // directory; one after it is reported, with the new one in place.
  void commit(const NewDirectory::IsReplaced& is_replaced = {});

 private:
  void require_room() const;
  void make_sibling();
  void require_untouched() const;
  void exchange(const NewDirectory::IsReplaced& is_replaced);

  std::string path_;
  IfExists if_exists_;
  std::string working_;   // empty after commit
  bool is_ours_ = false;  // `working_` was made here
  LockedFd lock_;         // of the sibling, while we live
  MadeHere made_here_;
};

// Moves `old_path` out of the way and `new_path` to its name, on file systems that cannot exchange
// two names. A crash between the two steps leaves only PATH.old-<id>, which `replaced_directory_of`
// finds. Returns where the old one is now.
[[nodiscard]] std::string exchange_in_two_steps(const std::string& new_path,
                                                const std::string& old_path);
// The one directory that a crash left as PATH.old-<id> when nothing has the name PATH; empty when
// there is none, or several.
[[nodiscard]] std::string replaced_directory_of(const std::string& path);

// A directory in which work goes on after an interruption.
//
// Its name is this, or "." before that of what is made in it and this behind it.
inline constexpr std::string_view kResumeMark = ".resume";
[[nodiscard]] inline bool is_resumable_name(std::string_view name) {
  return name.starts_with('.') && name.ends_with(kResumeMark);
}
//     PATH/lock   locked while somebody works (kWorkLock); its text says whose it is
//     PATH/new/   the files
//     PATH/...    what their writer notes of them

inline constexpr std::string_view kWorkLock = "lock";

// Whether somebody works or has worked in the directory: a user's may have such a name, and a lock.
[[nodiscard]] bool is_work_directory(const std::string& path);

class WorkDirectory {
 public:
  // Makes the directory, or takes over what an interrupted process left. Throws `conflict` while
  // another one works in it, `unsafe` when it is a link or another user's.
  explicit WorkDirectory(std::string path);
  // Leaves everything and lets go of the lock.
  ~WorkDirectory() = default;
  WorkDirectory(const WorkDirectory&) = delete;
  WorkDirectory& operator=(const WorkDirectory&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  // PATH/new; absent until something is written there.
  [[nodiscard]] const std::string& content() const noexcept { return content_; }
  // Removes all that is in the directory but the lock, in the order of names.
  void clear();
  // Removes the directory with all that is in it; the lock goes last.
  void remove();

 private:
  const std::string path_;
  const std::string content_;
  LockedFd lock_;
};

}  // namespace tessera
