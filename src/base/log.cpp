#include "base/log.h"

#include <memory>
#include <mutex>
#include <utility>

#include "base/fork.h"

namespace tessera {
namespace {

struct Hook {
  ShortMutex mutex;
  std::shared_ptr<const LogHook> current;  // guarded by mutex; null: nobody listens
};

Hook& the_hook() {
  static Hook hook;
  return hook;
}

}  // namespace

void set_log(LogHook hook) {
  auto next = hook ? std::make_shared<const LogHook>(std::move(hook)) : nullptr;
  const std::lock_guard lock(the_hook().mutex);
  the_hook().current = std::move(next);
}

void log(LogLevel level, std::string_view message) {
  std::shared_ptr<const LogHook> hook;
  {
    const std::lock_guard lock(the_hook().mutex);
    hook = the_hook().current;
  }
  if (hook) (*hook)(level, message);
}

}  // namespace tessera
