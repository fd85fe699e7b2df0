// What killed saves and replaced checkpoints left in a DCP directory.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "format/dcp/dcp.h"
#include "tessera/storage.h"

namespace tessera {

// The data files that a `.metadata` names.
[[nodiscard]] std::set<std::string> named_files(const dcp::Metadata& metadata);
// `__{rank}_{n}_{attempt}.distcp`, a name that one save only uses: torch's names lack the attempt.
[[nodiscard]] bool is_attempt_name(std::string_view name);

// Removes unfinished files, and data files and side files that do not belong to the present
// `.metadata`. Without a `.metadata` only those with names of ours go: they belong to nobody. Only
// while nobody writes.
void remove_leftovers(Store& store);

}  // namespace tessera
