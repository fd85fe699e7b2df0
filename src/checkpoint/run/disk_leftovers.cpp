#include "checkpoint/run/disk_leftovers.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/random_id.h"
#include "storage/posix/atomic_file.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kWorking = "-tmp-";

// "NAME-tmp-ATTEMPT" of any name, or of this one.
bool is_working_name(std::string_view name, std::string_view of = {}) {
  const std::size_t at = name.rfind(kWorking);
  if (at == std::string_view::npos || at == 0) return false;
  return is_attempt(name.substr(at + kWorking.size())) && (of.empty() || name.substr(0, at) == of);
}

struct Extent {
  std::uint64_t bytes = 0;
  Time last;
};

// Of a file or link, or of a directory with all that is in it.
void add_extent(const std::string& path, Extent& extent) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return;
  extent.last =
      std::max(extent.last, std::chrono::system_clock::from_time_t(status.st_mtim.tv_sec));
  if (S_ISREG(status.st_mode)) extent.bytes += static_cast<std::uint64_t>(status.st_size);
  if (!S_ISDIR(status.st_mode)) return;
  for (const DirectoryEntry& entry : readable_entries_of(path)) add_extent(entry.path, extent);
}

Leftover leftover_at(const std::string& path, LeftoverKind kind, Time now) {
  Extent extent;
  add_extent(path, extent);
  return {.kind = kind,
          .path = path,
          .bytes = extent.bytes,
          .age = std::chrono::duration_cast<std::chrono::seconds>(now - extent.last)};
}

class Search {
 public:
  explicit Search(Time now) : now_(now) {}

  void look_in(const std::string& directory, const std::vector<DirectoryEntry>& entries) {
    result_.directories.push_back(directory);
    for (const DirectoryEntry& entry : entries) {
      if (entry.is_directory && is_working_name(entry.name)) {
        result_.found.push_back(leftover_at(entry.path, LeftoverKind::directory, now_));
      } else if (entry.is_directory) {
        // What is closed to us we have not written.
        if (const auto below = entries_if_open(entry.path)) look_in(entry.path, *below);
      } else if (is_temporary_name(entry.name)) {
        result_.found.push_back(leftover_at(entry.path, LeftoverKind::file, now_));
      }
    }
  }

  void look_beside(const std::filesystem::path& directory) {
    const std::string name = directory.filename().string();
    if (name.empty() || name == "." || name == "..") return;
    for (const DirectoryEntry& entry : readable_entries_of(directory_of(directory))) {
      if (entry.is_directory && is_working_name(entry.name, name))
        result_.found.push_back(leftover_at(entry.path, LeftoverKind::directory, now_));
    }
  }

  [[nodiscard]] DiskLeftovers take() { return std::move(result_); }

 private:
  const Time now_;
  DiskLeftovers result_;
};

}  // namespace

DiskLeftovers disk_leftovers(const std::string& directory, Time now) {
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    throw Error(ErrorCode::not_found, "there is no such directory").at_path(directory);
  }
  Search search(now);
  search.look_in(directory, entries_of(directory));
  search.look_beside(directory);
  return search.take();
}

std::optional<Time> written_at(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return std::nullopt;
  return std::chrono::system_clock::from_time_t(status.st_mtim.tv_sec);
}

}  // namespace tessera
