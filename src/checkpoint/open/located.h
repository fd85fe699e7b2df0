// Locations that are URLs, as stores.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
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
// the extension of a kind that is a file the other way round. As it is when it is first
// asked. On a web server a directory is what has an index.
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

// The absolute path of what `path` means behind all links, as far as it is there.
[[nodiscard]] std::string followed_path(const std::string& path);
// Whether a path of this machine means a directory: one that is there, or by the slash at its end.
[[nodiscard]] bool names_directory(const std::filesystem::path& path);

// A directory on a web server, which lists nothing: the checkpoint's own index says what is there.

// Lists the files that `.metadata` names, or the index `index` of a set, as far as they are there.
[[nodiscard]] std::shared_ptr<Store> web_dcp_directory(std::shared_ptr<Store> server);
[[nodiscard]] std::shared_ptr<Store> web_set_directory(std::shared_ptr<Store> server,
                                                       const std::string& index);
// What a directory has that one of them takes; null: neither.
[[nodiscard]] std::shared_ptr<Store> web_directory(const std::shared_ptr<Store>& server);

// What there is beside a link that leads nowhere.

// The name of the newest checkpoint of a run ("step400", "step400-unsharded") that lies in the same
// directory as `link` and can be opened; empty: there is none. Nothing takes the place of what the
// link means: its error names this one (fault-rows C09).
[[nodiscard]] std::string newest_beside(const std::string& link);

// A store far away, as it was when it was first asked.

// Asks `store` once for what the opening of a checkpoint asks several times: a level is listed
// once, and answers for the names in it; an object is opened once, and if it has at most 1 MiB its
// bytes are read once. What a listing does not have is asked for before it is `not_found`. An
// object that is replaced meanwhile is `conflict` when it is read, as the store's sources say, or
// when a later listing tells it. Always asked anew is the file that tells one save into a directory
// from the next (read/side_file.h). Writes go to the store; after one everything is asked anew.
//
// `lists`: false for the store of a single object, whose level may be long: names are asked for one
// by one.
[[nodiscard]] std::shared_ptr<Store> snapshot_store(std::shared_ptr<Store> store, bool lists);

}  // namespace tessera
