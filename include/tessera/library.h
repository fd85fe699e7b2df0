// The library in a process: its version, what it says, and the environment that it reads.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

// The version of the headers: major * 10000 + minor * 100 + patch.
#define TESSERA_VERSION_NUMBER 100
#define TESSERA_VERSION_STRING "0.1.0"

namespace [[gnu::visibility("default")]] tessera {

// The version of the library. What a version may change: docs/versions.md.

// The version of the library that runs, as TESSERA_VERSION_STRING has it.
[[nodiscard]] std::string_view version() noexcept;

// What the library has to say that is no error: warnings that people need to hear, and notes. A
// program hears warnings without doing anything for it: each is written to stderr once, as
// `tessera: warning: TEXT`. What all ranks of a training say alike, rank 0 alone writes, told by
// RANK of the environment as torchrun sets it; what concerns one rank or one file, its own process.
// Notes (rates, what was chosen and why) are written, too, each time, where the environment has
// TESSERA_LOG=info.

enum class LogLevel : std::uint8_t { debug, info, warning };

using LogHook = std::function<void(LogLevel, std::string_view message)>;

// Replaces what the whole process does with messages; an empty hook brings the default back. A hook
// gets every message of its rank each time, of all levels. It may be called from several threads at
// once, must not throw, and may still be called by a message under way when set_log returns.
void set_log(LogHook hook);

// The process's environment, where it changes while the library works.

// Copies the environment. From then on the library takes what it needs to know of it (settings of
// stores, credentials, proxies, TMPDIR) from the latest copy, on all threads, and gives the copy to
// programs that it starts. Call it where nobody changes the environment at that moment. Any thread
// may call it. The Python package does so at the beginning of its calls, with the interpreter's
// lock, which `os.environ` takes, too. Libraries that are loaded for a first URL read it on their
// own: prepare_store() of stores.h loads them there and then.
//
// The environment itself is read, whenever a setting is needed, in a process that never called
// this. Then, as with getenv(), nobody may call setenv(), putenv() or unsetenv() while the library
// works.
void copy_environment();

}  // namespace tessera
