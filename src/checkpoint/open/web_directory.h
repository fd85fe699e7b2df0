// A directory on a web server, which lists nothing: the checkpoint's own index says what is there.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tessera/storage.h"

namespace tessera {

// Lists the files that `.metadata` names, or the index `index` of a set, as far as they are there.
[[nodiscard]] std::shared_ptr<Store> web_dcp_directory(std::shared_ptr<Store> server);
[[nodiscard]] std::shared_ptr<Store> web_set_directory(std::shared_ptr<Store> server,
                                                       const std::string& index);
// What a directory has that one of them takes; null: neither.
[[nodiscard]] std::shared_ptr<Store> web_directory(const std::shared_ptr<Store>& server);

}  // namespace tessera
