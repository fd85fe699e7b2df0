// The directory that a cache has for itself:
//
//     GIVEN/tessera-blocks-UID/CACHEDIR.TAG   says whose it is, also to programs for backups
//     GIVEN/tessera-blocks-UID/...            see block_cache.h
//
// Whatever else is in GIVEN is never looked into (SECURITY.md). Each user has one of its own, so
// that users may share GIVEN, and none takes what another one has put there.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace tessera {

class CacheDirectory {
 public:
  explicit CacheDirectory(const std::string& given);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  // Whether it is there. Throws `unsafe` for what may have things of others in it: no directory of
  // ours alone, or one without the marker; and `unsupported` for one of another version.
  [[nodiscard]] bool is_there() const;
  // Makes it, unless it is there.
  void make() const;
  // Whether a directory, or an open file, belongs to whom the cache belongs to, and nobody else may
  // write into it. Only after is_there() or make().
  [[nodiscard]] bool owns_directory(const std::string& path) const;
  [[nodiscard]] bool owns_file(int fd) const;

 private:
  [[nodiscard]] bool owns(uid_t owner, mode_t mode) const;
  void require_marker() const;

  const std::string path_;
  mutable std::atomic<std::int64_t> owner_{-1};  // of what we make; -1: not known yet
  mutable std::atomic<bool> is_marked_{false};   // the marker was seen
};

}  // namespace tessera
