// The names in a run's directory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/run_directory.h"

namespace tessera {

// A directory in a run that has to do with a step.
struct StepDirectory {
  enum class Role : std::uint8_t {
    current,   // NAME
    replaced,  // NAME.old-<id>: one that was being replaced
    attempt,   // NAME-tmp-<id>: one that was being written
  };
  std::int64_t step = 0;
  bool unsharded = false;
  Role role = Role::current;
  std::string directory;  // its name
};

// All of them, the newest first, sharded before unsharded, the current one of a name before others.
[[nodiscard]] std::vector<StepDirectory> step_directories(const Location& run);
// Those that hold a checkpoint or should: the current ones, and where that is missing and a single
// one was replaced, that one.
[[nodiscard]] std::vector<StepDirectory> standing(std::vector<StepDirectory> directories);

// Those that have their marker. In a store these are many small requests, made at once.
[[nodiscard]] std::vector<StepDirectory> marked(const Location& run,
                                                std::vector<StepDirectory> directories);

}  // namespace tessera
