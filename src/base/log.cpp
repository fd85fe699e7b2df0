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
  std::shared_ptr<const LogHook> current;     // null: the default
  std::unordered_set<std::string> said = {};  // by the default
};

Hook& the_hook() {
  static Hook hook;
  return hook;
}

bool is_first_rank() {
  const auto rank = environment_variable("RANK");
  return !rank || *rank == "0" || rank->empty();
}

// Not said before.
bool is_new(std::string_view message) {
  const std::lock_guard lock(the_hook().mutex);
  auto& said = the_hook().said;
  return said.size() < kMostTexts && said.emplace(message).second;
}

// One write, so that lines of several ranks stay whole.
void write(std::string_view message) {
  const auto line = "tessera: warning: " + std::string(message) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void say(LogLevel level, std::string_view message, bool is_of_all) {
  std::shared_ptr<const LogHook> hook;
  {
    const std::lock_guard lock(the_hook().mutex);
    hook = the_hook().current;
  }
  if (hook) return (*hook)(level, message);
  if (level != LogLevel::warning || (is_of_all && !is_first_rank())) return;
  if (is_new(message)) write(message);
}

}  // namespace

void set_log(LogHook hook) {
  auto next = hook ? std::make_shared<const LogHook>(std::move(hook)) : nullptr;
  const std::lock_guard lock(the_hook().mutex);
  the_hook().current = std::move(next);
}

void log(LogLevel level, std::string_view message) {
  say(level, message, false);
}

void log_of_all(LogLevel level, std::string_view message) {
  say(level, message, true);
}

}  // namespace tessera
