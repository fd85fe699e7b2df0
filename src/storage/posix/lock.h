// Locks that end with the process that holds them, however it ends.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "base/process.h"

namespace tessera {

enum class Locked : std::uint8_t {
  yes,
  no,       // another open file has it
  unknown,  // the file system cannot tell; errno says why
};
enum class LockKind : std::uint8_t { alone, shared };
// Takes the lock of an open file or directory (flock) without waiting. Several may have a shared
// one; nobody has one of the other kind then. On NFS a file has to be open for writing.
[[nodiscard]] Locked try_lock(int fd, LockKind kind = LockKind::alone);

// A file or directory whose lock this process has, if anybody can have it. It ends with this, or
// with the process: a child that was forked meanwhile keeps neither the lock nor the descriptor.
class LockedFd {
 public:
  LockedFd() = default;
  explicit LockedFd(Fd locked);
  LockedFd(LockedFd&& other) noexcept = default;
  LockedFd& operator=(LockedFd&& other) noexcept;
  ~LockedFd() { unlock(); }
  [[nodiscard]] int get() const noexcept { return fd_.get(); }
  [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(fd_); }

 private:
  void unlock() noexcept;

  Fd fd_;
  MadeHere made_here_;
};

// Opens the directory `path` and takes its lock. Throws `conflict` while another process has it.
[[nodiscard]] LockedFd locked_directory(const std::string& path);

// Whether the lock of the file or directory `path` could be had; `yes` if that is not there.
// `unknown` for a directory of a network file system: its lock does not reach other hosts.
[[nodiscard]] Locked is_free(const std::string& path);
// Removes it, with all that is in it, if that is `yes` or, with `unknown_too`, not `no`. Returns
// whether it has.
[[nodiscard]] bool remove_free(const std::string& path, bool unknown_too);

// Removes the file or directory `path`, with all that is in it, when it is ours and surely nobody
// has its lock: what a killed process left behind. Absent is not an error.
enum class Hosts : std::uint8_t { all, this_one };  // whose processes could have it
void remove_abandoned(const std::string& path, Hosts hosts = Hosts::all);
// The same for whatever of that type is in `directory`, named `start` and an attempt
// (base/process.h).
void remove_abandoned_attempts(const std::string& directory, std::string_view start,
                               std::filesystem::file_type type);

}  // namespace tessera
