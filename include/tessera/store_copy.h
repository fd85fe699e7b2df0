// Copies that a store makes by itself: no bytes pass through this process.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/storage.h"

namespace [[gnu::visibility("default")]] tessera {

struct StoreCopy {
  // What open() of this store gave, or of one with the same server and credentials. If its object
  // is replaced before the end, the copy is `conflict`, never a mixture.
  const ByteSource& from;
  std::string name;  // of the copy
  IfExists if_exists = IfExists::replace;
  // Hears of bytes that are copied. What it throws ends the copy.
  std::function<void(std::uint64_t bytes)> copied;
};

enum class StoreCopied : std::uint8_t {
  cannot,     // nothing was done: read and write the bytes instead
  done,       // the copy is visible, by one step
  was_there,  // the object is a copy already that the store made of this version of the source
};

}  // namespace tessera
