// What stores need of other libraries, loaded ahead of time.
#pragma once

#include <string>

namespace [[gnu::visibility("default")]] tessera {

// Loads the libraries that the store of a URL needs; else the first open_store() of one does, on
// whatever thread that is. They read the environment while they are loaded (environment.h). Nothing
// for a path. Throws `unsupported` where a library is missing or too old.
void prepare_store(const std::string& path_or_url);

}  // namespace tessera
