// Models, datasets and spaces of the Hugging Face Hub, which are read and not written.
#pragma once

#include <memory>

#include "storage/http/client.h"
#include "storage/hub/hub_url.h"
#include "tessera/storage.h"

namespace tessera::hub {

// The directory that `url` names, at the commit that its revision is when something is first asked
// of the store: what is pushed later, another store finds. create(), remove() and
// require_writable() are `unsupported`. A file's version is the digest of its bytes, by which the
// Hub knows it. Reads are of the server that the Hub sends readers to; its signed address is kept,
// and asked for anew when it is refused. Throws what hub_access() throws.
[[nodiscard]] std::shared_ptr<Store> hub_store(HubUrl url, std::shared_ptr<HttpClient> client);

}  // namespace tessera::hub
