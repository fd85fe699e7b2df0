#include "base/log.h"

#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/environment.h"
#include "base/fork.h"

namespace tessera {
namespace {

// A program that makes new texts for ever hears no new ones in the end.
constexpr std::size_t kMostTexts = 10'000;

struct Hook {
  ShortMutex mutex;
  std::shared_ptr<const LogHook> current;                 // guarded by mutex; null: the default
  std::unique_ptr<std::unordered_set<std::string>> said;  // by the default; guarded by mutex
};

constinit Hook hook;

bool is_first_rank() {
  const auto rank = environment_variable("RANK");
  return !rank || *rank == "0" || rank->empty();
}

// Not said before.
bool is_new(std::string_view message) {
  const std::lock_guard lock(hook.mutex);
  if (!hook.said) hook.said = std::make_unique<std::unordered_set<std::string>>();
  return hook.said->size() < kMostTexts && hook.said->emplace(message).second;
}

// One write, so that lines of several ranks stay whole.
void write(std::string_view message) {
  const auto line = "tessera: warning: " + std::string(message) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void say(LogLevel level, std::string_view message, bool is_of_all) {
  std::shared_ptr<const LogHook> listener;
  {
    const std::lock_guard lock(hook.mutex);
    listener = hook.current;
  }
  if (listener) return (*listener)(level, message);
  if (level != LogLevel::warning || (is_of_all && !is_first_rank())) return;
  if (is_new(message)) write(message);
}

}  // namespace

void set_log(LogHook given) {
  auto next = given ? std::make_shared<const LogHook>(std::move(given)) : nullptr;
  const std::lock_guard lock(hook.mutex);
  hook.current = std::move(next);
}

void log(LogLevel level, std::string_view message) {
  say(level, message, false);
}

void log_of_all(LogLevel level, std::string_view message) {
  say(level, message, true);
}

}  // namespace tessera
