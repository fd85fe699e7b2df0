// Objects behind http:// and https://, which are read and not written.
#pragma once

#include <memory>
#include <string>

#include "storage/http/client.h"
#include "storage/http/uri.h"
#include "tessera/storage.h"

namespace tessera {

// A name as an address spells it: percent-encoded in one of many ways, of which a signature may
// cover one.
struct SpelledName {
  std::string name, as_written;
};

// `directory`: names are put behind its path, percent-encoded but for `spelled`, and its query
// behind them. Beside a `spelled` one with a query, which may be signed for it alone, what the
// server forbids is not there. A web server tells no listing: list(), create() and remove() are
// `unsupported`, open() and exists() work. An object that was replaced since it was opened is
// `conflict`, as far as the server tells: by ETag, or by Last-Modified where it has no strong one,
// and by its size. A server that answers with other bytes than those asked for is `corrupt`. Five
// redirects are followed, and never one from https to http.
[[nodiscard]] std::shared_ptr<Store> http_store(const Uri& directory,
                                                std::shared_ptr<HttpClient> client,
                                                SpelledName spelled = {});

}  // namespace tessera
