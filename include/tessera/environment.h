// The process's environment, where it changes while the library works.
#pragma once

namespace [[gnu::visibility("default")]] tessera {

// Copies the environment. From then on the library takes what it needs to know of it (settings of
// stores, credentials, proxies, TMPDIR) from the latest copy, on all threads, and gives the copy to
// programs that it starts. Call it where nobody changes the environment at that moment. Any thread
// may call it. The Python package does so at the beginning of its calls, with the interpreter's
// lock, which `os.environ` takes, too. Libraries that are loaded for a first URL read it on their
// own: prepare_store() of prepare_store.h loads them there and then.
//
// Where it was never called, the environment itself is read whenever a setting is needed. Then, as
// with getenv(), nobody may call setenv(), putenv() or unsetenv() while the library works.
void copy_environment();

}  // namespace tessera
