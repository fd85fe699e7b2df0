// Finds the digests that belong to a checkpoint and puts them between it and its readers.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/read/side_file.h"
#include "storage/storage.h"
#include "tessera/storage.h"

namespace tessera {

// A source that checks what is read of `source`, which has these digests.
[[nodiscard]] std::shared_ptr<ByteSource> guarded_source(std::shared_ptr<ByteSource> source,
                                                         const FileDigests& digests);
// `store` whose `open` gives, for the files of `digests`, sources that check what is read. The
// digests of a file may come later, but before it is opened. A file of another size than was
// recorded is refused at its first read.
[[nodiscard]] std::shared_ptr<Store> guarded_store(std::shared_ptr<Store> store,
                                                   std::shared_ptr<const DigestsByName> digests);
// The digests by which such a store checks this file; null where it does not.
[[nodiscard]] const FileDigests* digests_of(const Store& store, const std::string& name);
// Throws `incomplete` for a file of `digests` that is missing in `objects`, those of `store`, or
// shorter than recorded, and `corrupt` for one that is longer. `may_lack`: whoever opens the
// checkpoint finds out on its own what is missing.
void require_sizes(const DigestsByName& digests, NearObjects& objects, const Store& store,
                   bool may_lack);

// The files that the digests of a guarded store name and that are not among `objects`, sorted.
[[nodiscard]] std::vector<std::string> lacked_files(const Store& store, NearObjects& objects);

// The side file `name` of `store`. Throws `corrupt` when it is damaged.
[[nodiscard]] SideFile read_side_file(const Store& store, std::string_view name);

// Each finds the side file by the rule of its kind of checkpoint and returns the guarded store, or
// `store` itself when there is none. A damaged side file is `corrupt`. A DCP directory with its
// `.metadata` has a rule of its own (dcp/guard_dcp.h).
//
// A directory without `.metadata`. `may_lack`: as above.
[[nodiscard]] std::shared_ptr<Store> guard_directory(std::shared_ptr<Store> store, bool may_lack);
// The same where other files may lie on other nodes: only what is read is compared.
[[nodiscard]] std::shared_ptr<Store> guard_present(std::shared_ptr<Store> store);
// A single file.
[[nodiscard]] std::shared_ptr<Store> guard_file(std::shared_ptr<Store> store,
                                                const ObjectInfo& file);

}  // namespace tessera
