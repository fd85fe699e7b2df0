// Which store a path or a URL means.
#pragma once

#include <memory>
#include <string>

#include "tessera/storage.h"

namespace tessera {

// Whether open_store() gives something else for it than a directory of this machine. "./s3://b" is
// a path, and file:///b is none that is remote.
[[nodiscard]] bool is_remote(const std::string& path);
// What the last part of a URL names in the directory above: of a bucket as it is, of a web address
// decoded, without the query. Empty where the URL ends with a slash, or names a whole bucket.
[[nodiscard]] std::string last_name(const std::string& url);
// The store of the directory above, in which last_name() is what `url` names: a web server is asked
// for that as it was written. The query of a web address belongs to all names of the store.
[[nodiscard]] std::shared_ptr<Store> open_above(const std::string& url);
// Of file://, the path; anything else as it is. Throws `invalid_argument` for file://HOST/.
[[nodiscard]] std::string without_file_scheme(const std::string& path);

}  // namespace tessera
