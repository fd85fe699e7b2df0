// One rank's part of a save without collectives.
#pragma once

#include <memory>

#include "base/log.h"
#include "tessera/data_files.h"

namespace tessera {

// save_part() of tessera/data_files.h, into the root of `store`, with its phases in `log`.
SaveResult dcp_save_part(const Value& tree, Store& store, int rank, const SaveOptions& options,
                         const JobLog& log);

}  // namespace tessera
