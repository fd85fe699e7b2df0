// Copies of objects that the server makes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "storage/s3/bucket.h"
#include "tessera/store_copy.h"

namespace tessera::s3 {

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
