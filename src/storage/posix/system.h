// System calls on directories, and the Error that a failed call becomes.
#pragma once

#include <string>

namespace tessera {

// Throws not_found, already_exists, out_of_space or io, with the system's own words.
[[noreturn]] void throw_errno(int error_number, const std::string& operation,
                              const std::string& path);

// Makes the entries of `directory` durable.
void sync_directory(const std::string& directory);

// Creates `directory` and its missing parents; each new one is durable in its own parent.
void make_directories(const std::string& directory);

}  // namespace tessera
