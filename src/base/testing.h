// For tests: the warnings that the library gives.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/library.h"

namespace tessera::testing_support {

// The warnings of all threads while it lives. One at a time.
class Warnings {
 public:
  Warnings() {
    set_log([this](LogLevel level, std::string_view text) {
      const std::lock_guard lock(mutex_);
      if (level == LogLevel::warning) texts_.emplace_back(text);
    });
  }
  ~Warnings() { set_log({}); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  [[nodiscard]] std::vector<std::string> texts() const {
    const std::lock_guard lock(mutex_);
    return texts_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> texts_;  // guarded by mutex_
};

// The warnings that `work` causes.
template <typename Work>
std::vector<std::string> warnings_of(Work&& work) {
  const Warnings warnings;
  work();
  return warnings.texts();
}

}  // namespace tessera::testing_support
