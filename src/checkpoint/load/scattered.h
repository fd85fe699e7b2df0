// Why a checkpoint is not all there: its files may lie on the disks of several nodes.
#pragma once

#include "tessera/checkpoint.h"
#include "tessera/comm.h"

namespace tessera {

// On all ranks, which have got `error` together: throws it on all, and where that is `incomplete`
// and other ranks see files of an olmo-local or olmo-legacy checkpoint that rank 0 does not, says
// who has which, and what can be done. Collective.
[[noreturn]] void rethrow_with_disks(const Error& error, const Location& where, Group& group);

}  // namespace tessera
