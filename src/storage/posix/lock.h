// Locks that end with the process that holds them, however it ends.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/fd.h"

namespace tessera {

// Takes the lock of an open file or directory (flock) without waiting. False: another open file
// has it. A file system without locks counts as free.
[[nodiscard]] bool try_lock(int fd);
// The same for a lock that several may have; nobody else has one of the other kind then.
[[nodiscard]] bool try_shared_lock(int fd);

// Opens the directory `path` and takes its lock; both end with the result. Throws `conflict` while
// another process has it.
[[nodiscard]] Fd locked_directory(const std::string& path);

// Removes the file or directory `path`, with all that is in it, when it is ours and nobody has its
// lock: what a killed process left behind. Absent is not an error.
void remove_abandoned(const std::string& path);
// The same for whatever of that type is in `directory`, named `start` and an attempt
// (base/random_id.h).
void remove_abandoned_attempts(const std::string& directory, std::string_view start,
                               std::filesystem::file_type type);

}  // namespace tessera
