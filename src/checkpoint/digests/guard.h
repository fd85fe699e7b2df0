// Finds the digests that belong to a checkpoint and puts them between it and its readers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/digests/side_file.h"
#include "format/dcp/dcp.h"
#include "tessera/storage.h"

namespace tessera {

// `store` whose `open` gives, for the files of `digests`, sources that check what is read. Throws
// `incomplete` for a file of them that is missing in `objects` (what the store holds) or shorter
// than recorded, and `corrupt` for one that is longer.
[[nodiscard]] std::shared_ptr<Store> guarded_store(std::shared_ptr<Store> store,
                                                   const std::vector<ObjectInfo>& objects,
                                                   DigestsByName digests);

// Each finds the side file by the rule of its kind of checkpoint and returns the guarded store, or
// `store` itself when there is none. A damaged side file is `corrupt`.
//
// A DCP directory: the side file of `metadata`'s save. `.metadata` itself is compared first. One
// that belongs to another save is ignored with a line in `warnings`, unless it holds digests of
// data files that `metadata` names and whose names are used by one save only: then one of the two
// was changed, which is `corrupt`. `types` becomes what the side file says of them.
[[nodiscard]] std::shared_ptr<Store> guard_dcp(std::shared_ptr<Store> store,
                                               const dcp::Metadata& metadata,
                                               std::vector<std::string>& warnings,
                                               std::string& types);
// A directory without `.metadata`.
[[nodiscard]] std::shared_ptr<Store> guard_directory(std::shared_ptr<Store> store);
// A single file.
[[nodiscard]] std::shared_ptr<Store> guard_file(std::shared_ptr<Store> store,
                                                const ObjectInfo& file);

// What the side file of a DCP directory is called by: the save's id, or where `.metadata` has none
// that fits a file name, the digest of its bytes.
[[nodiscard]] std::string save_id_of(const Store& store, const dcp::Metadata& metadata);

}  // namespace tessera
