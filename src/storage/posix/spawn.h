// Programs that this process starts.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct SpawnOptions {
  std::vector<std::pair<int, int>> descriptors = {};  // of this process, and in the program
  std::vector<int> null = {};  // in the program: read from nothing (0), or written to nothing
  // A session of its own: launchers and terminals signal a process group. Signals are as at the
  // beginning of a program, then.
  bool own_session = false;
};

// Starts `program` with `words`, its own name the first, and the library's copy of the environment.
// Signals that this thread keeps back reach it. Returns errno's number; 0: `id` runs.
[[nodiscard]] int spawn(pid_t& id, const std::string& program, std::vector<std::string> words,
                        const SpawnOptions& options);

}  // namespace tessera
