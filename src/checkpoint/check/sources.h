// The files of an open checkpoint, as what is read of them is checked.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "tessera/checkpoint.h"

namespace tessera {

using SourceByName = std::map<std::string, std::shared_ptr<const ByteSource>>;

// Every file with the digests that there are for it; by the source's name.
[[nodiscard]] SourceByName sources_of(const Checkpoint& checkpoint);

}  // namespace tessera
