// What the library has to say that is no error: warnings that people need to hear, and notes. A
// program hears warnings without doing anything for it: each is written to stderr once, as
// `tessera: warning: TEXT`. What all ranks of a training say alike, rank 0 alone writes, told by
// RANK of the environment as torchrun sets it; what concerns one rank or one file, its own process.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace [[gnu::visibility("default")]] tessera {

enum class LogLevel : std::uint8_t { debug, info, warning };

using LogHook = std::function<void(LogLevel, std::string_view message)>;

// Replaces what the whole process does with messages; an empty hook brings the default back. A hook
// gets every message of its rank each time, of all levels. It may be called from several threads at
// once, must not throw, and may still be called by a message under way when set_log returns.
void set_log(LogHook hook);

}  // namespace tessera
