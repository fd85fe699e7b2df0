// A run's checkpoint in the memory of writer processes whose trainers have died.
#pragma once

#include <optional>

#include "tessera/comm.h"
#include "tessera/run_directory.h"

namespace tessera {

// The newest snapshot of the run of which this host has all ranks' parts, no byte changed, with its
// place as a URL of `arena`; none: there is none. What is torn is passed over, and the log says so.
[[nodiscard]] std::optional<RunCheckpoint> kept_checkpoint(const Location& run,
                                                           const RunCheck& check);
// The same for all ranks, by rank 0; none, too, if they are on several hosts. Collective.
[[nodiscard]] std::optional<RunCheckpoint> kept_checkpoint(const Location& run,
                                                           const RunCheck& check, Group& group);
// Which of the two a training goes on from: the newer one, or of one step that in memory. The log
// says so where it is that.
[[nodiscard]] std::optional<RunCheckpoint> newer_of(std::optional<RunCheckpoint> stored,
                                                    std::optional<RunCheckpoint> kept);

}  // namespace tessera
