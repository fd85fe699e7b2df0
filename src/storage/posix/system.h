// System calls on directories, and the Error that a failed call becomes.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <filesystem>
#include <string>

namespace tessera {

// Throws not_found, already_exists, out_of_space or io, with the system's own words.
[[noreturn]] void throw_errno(int error_number, const std::string& operation,
                              const std::string& path);

// Whether a call failed because kernel or file system do not know what its flags ask for.
[[nodiscard]] bool lacks_flag(int error_number);

// Makes a call that reads or writes, again as long as signals interrupt it.
template <typename Call>
[[nodiscard]] ssize_t uninterrupted(Call call) {
  ssize_t result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// The directory that `path` is in, "." where it names none.
[[nodiscard]] std::string directory_of(const std::filesystem::path& path);
[[nodiscard]] std::string without_slashes(std::string path);  // at its end

// Throws `unsupported` for a URL: no store is built for its scheme, and a directory of that name is
// not meant. "./s3://b" is a path.
void require_local(const std::string& path);

// Makes the entries of `directory` durable.
void sync_directory(const std::string& directory);

// Creates `directory` and its missing parents; each new one is durable in its own parent.
void make_directories(const std::string& directory);

}  // namespace tessera
