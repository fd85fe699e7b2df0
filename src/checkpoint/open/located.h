// Locations that are URLs, as stores.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/storage.h"

namespace tessera {

// Whether it is a path of this machine: no store, and no URL but file://.
[[nodiscard]] bool is_on_disk(const Location& where);

// Each returns a path of this machine without its scheme, and what is a store already as it is.
// What a URL of another scheme means depends on what is asked for:
[[nodiscard]] Location located_directory(const Location& where);  // always a directory
// A directory if there is something in it, else an object if there is one of that name; names with
// the extension of a kind that is a file the other way round. As it is when it is first asked
// (snapshot_store.h). On a web server a directory is what has an index (web_directory.h).
[[nodiscard]] Location located_source(const Location& where);
// An object if its extension is that of a kind that is a file. Of any other name a directory, or,
// where `file` is what the target is called in a directory, an object: that one in a directory in
// which there is something or whose URL ends with a slash, else the one that was named.
[[nodiscard]] Location located_target(const Location& where, std::string_view file = {});
// An object of whatever name. A directory, if the path or URL ends with a slash, is a whole bucket,
// or is a directory of this machine: then Location::name is empty.
[[nodiscard]] Location located_file(const Location& where);

// A directory as a store: of a path, a URL, a store's root, or a directory in a store.
[[nodiscard]] std::shared_ptr<Store> directory_store(const Location& where);

// Whether a path of this machine means a directory: one that is there, or by the slash at its end.
[[nodiscard]] bool names_directory(const std::filesystem::path& path);

}  // namespace tessera
