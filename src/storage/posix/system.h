// System calls on directories, and the Error that a failed call becomes.
#pragma once

#include <sys/types.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/process.h"
#include "tessera/error.h"

namespace tessera {

// What a failed call means: not_found, already_exists, out_of_space (also for a file that may not
// become as large) or io.
#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
[[nodiscard]] ErrorCode error_code_of(int error_number);
#pragma GCC visibility pop
// Throws that, with the system's own words.
[[noreturn]] void throw_errno(int error_number, const std::string& operation,
                              const std::string& path);

// Whether a call failed because kernel or file system do not know what its flags ask for.
[[nodiscard]] bool lacks_flag(int error_number);

// Makes a call of the system, again as long as signals interrupt it.
template <typename Call>
[[nodiscard]] auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}
// The same for one that reads or writes, which is also made again for some time if it would have to
// wait (EAGAIN).
[[nodiscard]] ssize_t transferred(const std::function<ssize_t()>& call);

// None if it fails: `errno` says why.
[[nodiscard]] Fd opened(const std::string& path, int flags);
// Makes an open file durable. A failure must not be tried again.
void sync_open(int fd, const std::string& path);

// Whether one kernel alone writes to the file system, so that all its processes see the same.
[[nodiscard]] bool is_of_one_host(const struct statfs& system) noexcept;

// Which file or directory it is, whatever it is called.
struct FileId {
  std::uint64_t device = 0, number = 0;
  [[nodiscard]] bool operator==(const FileId&) const = default;
};
// None if there is none. That of a link is its own, or that of what it leads to.
[[nodiscard]] std::optional<FileId> id_of(const std::string& path);
[[nodiscard]] std::optional<FileId> id_behind(const std::string& path);
[[nodiscard]] std::optional<FileId> id_of(int fd);
// Whether that file has the name `path`: then a call that was to give it is done, whatever it said.
// A network file system sends a call again whose answer it has lost, and reports the answer to the
// second one.
[[nodiscard]] bool is_at(const std::optional<FileId>& file, const std::string& path);

// Who the file system says that what we make in `directory` belongs to: not always who we are,
// where it is remote.
[[nodiscard]] uid_t owner_of_ours(const std::string& directory);

// Gives a file or directory that is to replace `old` the mode of that, its POSIX ACL or that it has
// none, and its owner and group as far as we may; a group that it does not get has no more rights
// than others, and the owner of a directory keeps all. Where the ACL cannot be given, users and
// groups that it names have the rights of others. Nothing where there is no `old`, something else,
// or a file system that knows no modes.
void take_access_of(const std::string& old, const std::string& path);
// The path where the link `path` leads, there or not; `path` itself if it is none. Throws `io` for
// links in a circle.
[[nodiscard]] std::string end_of_links(const std::string& path);

// The directory that `path` is in, "." where it names none.
[[nodiscard]] std::string directory_of(const std::filesystem::path& path);
[[nodiscard]] std::string without_slashes(std::string path);  // at its end

// Throws `unsupported` for a URL: no store is built for its scheme, and a directory of that name is
// not meant. "./s3://b" is a path.
void require_local(const std::string& path);

// What is in a directory.
struct DirectoryEntry {
  std::string path;  // begins with the directory
  std::string name;
  bool is_directory = false;     // a link to one is none
  bool is_regular_file = false;  // or a link to one
};
// Empty if there is no such directory; none if we may not read it. (Iterators of the standard
// library end the process where memory is short.)
[[nodiscard]] std::optional<std::vector<DirectoryEntry>> entries_if_open(
    const std::string& directory);
// The same, and an error if we may not read it.
[[nodiscard]] std::vector<DirectoryEntry> entries_of(const std::string& directory);
// The same, and none where they cannot be read.
[[nodiscard]] std::vector<DirectoryEntry> readable_entries_of(const std::string& directory);
// Removes a directory with all that is in it, or a file. Absent is no error.
void remove_all(const std::string& path);

// Makes the entries of `directory` durable, where the file system can do that for directories.
void sync_directory(const std::string& directory);

// Creates `directory` and its missing parents; each new one is durable in its own parent.
void make_directories(const std::string& directory);

}  // namespace tessera
