// Finds the digests of a DCP directory and puts them between it and its readers.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/read/side_file.h"
#include "format/dcp/dcp.h"
#include "tessera/storage.h"

namespace tessera {

// What the side file of a save says, and the store that is guarded by it.
struct DcpGuard {
  std::shared_ptr<Store> store;
  std::shared_ptr<const DigestsByName> digests;  // empty where there is no side file
  std::string types = {};
};
// The guard of `metadata`'s save, or `store` itself when there is none. A damaged side file is
// `corrupt`. `.metadata` itself is compared first. A side file that belongs to another save is
// ignored with a line in `warnings`, unless it holds digests of data files that `metadata` names
// and whose names are used by one save only: then one of the two was changed, which is `corrupt`.
[[nodiscard]] DcpGuard guard_dcp(const std::shared_ptr<Store>& store, const dcp::Metadata& metadata,
                                 std::vector<std::string>& warnings);
// What the side file of a DCP directory is called by: the save's id, or where `.metadata` has none
// that fits a file name, the digest of its bytes.
[[nodiscard]] std::string save_id_of(const Store& store, const dcp::Metadata& metadata);
[[nodiscard]] bool fits_file_name(const std::string& id);

// Which of a DCP directory's `objects` belong to the checkpoint that is there, by name: `.metadata`
// or the `__{rank}.metadata` of ranks, the data files that these name, the side file, and what that
// names. Saves, conversions, copies and gc ask this alone. Empty: no checkpoint is there. Throws
// what reading these files throws.
[[nodiscard]] std::set<std::string> own_files(const Store& store,
                                              const std::vector<ObjectInfo>& objects);
// The same for who has asked whether there is a `.metadata`.
[[nodiscard]] std::set<std::string> own_files(const Store& store,
                                              const std::vector<ObjectInfo>& objects,
                                              bool has_metadata);

}  // namespace tessera
