// The processes `tessera writer` that a test has started, alive or left behind.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

namespace tessera::testing {

// The process that this one has started.
inline pid_t only_child() {
  pid_t child = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    std::ifstream(task.path() / "children") >> child;
  return child;
}

// Of a file of /proc; of a process that ends meanwhile nothing.
inline std::string content_of_proc(const std::filesystem::path& file) {
  std::ifstream text(file);
  std::ostringstream content;
  content << text.rdbuf();
  return content.str();
}

// Those that say in this directory what they keep (TESSERA_ARENA_DIR). Sorted.
inline std::vector<pid_t> writers_with_arenas_in(const std::string& directory) {
  using std::string_literals::operator""s;
  std::vector<pid_t> found;
  std::error_code none;
  for (std::filesystem::directory_iterator at("/proc", none), end; !none && at != end;
       at.increment(none)) {
    const std::string name = at->path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    // Of one that has ended and for which nobody has waited both are empty.
    if (content_of_proc(at->path() / "cmdline").find("\0writer\0"s) == std::string::npos) continue;
    const std::string environment = "\0"s + content_of_proc(at->path() / "environ");
    if (environment.find("\0TESSERA_ARENA_DIR="s + directory + "\0"s) == std::string::npos)
      continue;
    found.push_back(std::stoi(name));
  }
  std::ranges::sort(found);
  return found;
}

}  // namespace tessera::testing
