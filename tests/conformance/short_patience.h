// For tests of what never appears.
#pragma once

#include <chrono>

#include "base/parallel.h"

namespace tessera::testing_support {

// As long as it lives, ranks soon give up what they wait for.
class ShortPatience {
 public:
  explicit ShortPatience(std::chrono::milliseconds within = std::chrono::milliseconds(100))
      : before_(visible_within.exchange(within)) {}
  ~ShortPatience() { visible_within = before_; }
  ShortPatience(const ShortPatience&) = delete;
  ShortPatience& operator=(const ShortPatience&) = delete;

 private:
  const std::chrono::milliseconds before_;
};

}  // namespace tessera::testing_support
