// Where a library says what is worth knowing but is no error. It prints nothing by itself: the
// program that wants to hear sets a hook.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace tessera {

enum class LogLevel : std::uint8_t { debug, info, warning };

using LogHook = std::function<void(LogLevel, std::string_view)>;

// Replaces the hook of the whole process; an empty one (the default) drops every message. The hook
// may be called from several threads at once. A message under way may still reach the old hook.
void set_log(LogHook hook);
void log(LogLevel level, std::string_view message);

}  // namespace tessera
