// The catalog of an opened checkpoint of any kind.
#pragma once

#include "checkpoint/open/open.h"
#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/io.h"

namespace tessera {

// All that a rank has learned of a checkpoint, as bytes by which others load from it without
// opening it: its leaves, where each piece of their tensors lies, and the digests of the files
// there. (A DCP directory gets its catalog before it is a checkpoint, and each rank looks up the
// pieces that it needs: dcp/catalog.h.) Without `places` no tensor has pieces.
[[nodiscard]] Bytes catalog_of(const Checkpoint& checkpoint, bool places);

// The checkpoint that a catalog tells of: its leaves, kind, save, types and warnings. `at`: where
// this rank sees it. Files are opened when they are first read, and the catalog is not needed then.
// A tensor in two leaves is one node here, too, if it has pieces.
[[nodiscard]] Checkpoint opened_by(ByteView catalog, const Place& at);

}  // namespace tessera
