// A directory in which work goes on after an interruption.
//
//     PATH/journal   what is done; locked while somebody works
//     PATH/new/      the files
#pragma once

#include <string>

#include "storage/posix/lock.h"

namespace tessera {

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
  // The journal, open for reading and appending.
  [[nodiscard]] int journal() const noexcept { return journal_.get(); }
  // Removes all of `content`.
  void clear();
  // Removes the directory with all that is in it; the journal goes last.
  void remove();

 private:
  const std::string path_;
  const std::string content_;
  LockedFd journal_;
};

}  // namespace tessera
