#include "base/environment.h"

#include <unistd.h>

#include <mutex>
#include <utility>

#include "base/fork.h"

namespace tessera {
namespace {

// Is there until the process ends, and after the destructors of static objects: threads may work
// on.
struct Latest {
  ShortMutex mutex;
  std::shared_ptr<const Variables> copy;  // null: none was made; guarded by mutex
};

Latest& latest = *new Latest;

std::shared_ptr<const Variables> copied() {
  auto copy = std::make_shared<Variables>();
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable)
    copy->emplace_back(*variable);
  return copy;
}

}  // namespace

void copy_environment() {
  std::shared_ptr<const Variables> copy = copied();
  const std::lock_guard lock(latest.mutex);
  latest.copy.swap(copy);
}

std::shared_ptr<const Variables> variables() {
  {
    const std::lock_guard lock(latest.mutex);
    if (latest.copy) return latest.copy;
  }
  return copied();
}

std::optional<std::string> variable_of(const Variables& all, std::string_view name) {
  for (const std::string& variable : all) {
    if (variable.size() > name.size() && variable[name.size()] == '=' && variable.starts_with(name))
      return variable.substr(name.size() + 1);
  }
  return std::nullopt;
}

std::optional<std::string> environment_variable(std::string_view name) {
  return variable_of(*variables(), name);
}

}  // namespace tessera
