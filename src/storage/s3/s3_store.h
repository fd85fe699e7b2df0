// Objects of a bucket below a prefix, as a store.
#pragma once

#include <memory>

#include "storage/http/client.h"
#include "storage/http/uri.h"
#include "storage/s3/bucket.h"
#include "tessera/storage.h"

namespace tessera {

// For s3://BUCKET/PREFIX and what else s3::settings_for takes. A name is one even if objects lie
// below it ("a" beside "a/b"); keys that are no names of a store, as the "a/" that consoles make
// for folders, are passed over. Nothing but a source that is open reads an object: it gives the
// bytes that were there when it was opened, or `conflict` once they are replaced or removed.
// Directories do not appear in one step, and an object has one writer: new_directory and share are
// `unsupported`.
[[nodiscard]] std::shared_ptr<Store> s3_store(const Uri& url, std::shared_ptr<HttpClient> client);

namespace s3 {
// The bucket that a URL names. The same one as before while settings, client and the environment's
// variables of AWS are the same: it knows its credentials, region and clock, and what was tried.
[[nodiscard]] std::shared_ptr<Bucket> bucket_of(const Uri& url, std::shared_ptr<HttpClient> client);
}  // namespace s3

}  // namespace tessera
