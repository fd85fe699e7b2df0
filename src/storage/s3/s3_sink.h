// Writes one object of a bucket: by one PUT if it is small, else by an upload in parts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "storage/s3/bucket.h"
#include "tessera/storage.h"

namespace tessera::s3 {

// Bytes come in any order and from several threads; a part is sent by the thread that completes it,
// straight from the caller's memory where one write has all of it. Kept in memory are the parts of
// which some bytes are there and some are not: one for a writer that goes from front to back, and
// as many as a writer jumps about in. An object that does not reach behind its first part is one
// PUT.
//
// `condition` is that of the request that makes the object visible; if it does not hold, commit is
// `already_exists`, or of a version `conflict`. If its answer is
// lost, or is that somebody wrote the object, or that there is no such upload, the object itself
// tells whether it is this sink's. The server may ask to write the object again (409, another
// writer at the same moment); the bytes are gone by then, so that is `conflict` once some pauses
// were no help. After an error all later calls throw it. Destroyed without commit it aborts the
// upload; what an abort that fails leaves is an unfinished upload of this key
// (Bucket::list_uploads).
[[nodiscard]] std::unique_ptr<ByteSink> s3_sink(std::shared_ptr<Bucket> bucket, std::string key,
                                                Condition condition, std::uint64_t size_hint);

}  // namespace tessera::s3
