// Objects of a bucket below a prefix, as a store.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

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

namespace tessera::s3 {

// Whether a bucket grants what a save asks of it, before the save begins.

// Sends one request of each kind that a save sends, about an object `key` that nobody else uses and
// that is gone afterwards. Throws what the first refused one does, naming the permission that it
// needs (fault-rows O30). Commits keep rivals out by conditional writes; a server that does not
// heed them (fault-rows O13, O14) is `unsupported`, unless the caller is the only writer: then no
// conditions are sent from now on.
void require_writable(Bucket& bucket, const std::string& key, bool is_only_writer);

// Copies of objects that the server makes.

struct ServerCopy {
  CopiedObject from;
  std::uint64_t size = 0;  // bytes
  std::string to;          // key
  IfExists if_exists = IfExists::replace;
  std::function<void(std::uint64_t bytes)> copied;
};

// One request for a small object, parts for others: the server copies several at once, and none
// takes so long that its connection looks dead. The attempt of the copy says of which version of
// which object it is one, so a second call finds that the copy is there. Small objects with
// IfExists::fail cannot be copied: conditions are for uploads. An upload that fails is aborted.
StoreCopied copy_by_server(Bucket& bucket, const ServerCopy& copy);

}  // namespace tessera::s3
