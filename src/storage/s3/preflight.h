// Whether a bucket grants what a save asks of it, before the save begins.
#pragma once

#include <string>

#include "storage/s3/bucket.h"

namespace tessera::s3 {

// Sends one request of each kind that a save sends, about an object `key` that nobody else uses and
// that is gone afterwards. Throws what the first refused one does, naming the permission that it
// needs (fault-rows O30). Commits keep rivals out by conditional writes; a server that does not
// heed them (fault-rows O13, O14) is `unsupported`, unless the caller is the only writer: then no
// conditions are sent from now on.
void require_writable(Bucket& bucket, const std::string& key, bool is_only_writer);

}  // namespace tessera::s3
