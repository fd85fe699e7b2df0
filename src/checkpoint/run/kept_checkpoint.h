// A run's checkpoint in the memory of writer processes whose trainers have died.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm.h"
#include "tessera/run_directory.h"

namespace tessera {

// What there is in memory, before anybody has read it.
struct KeptChoice {
  // Where the processes of the newest snapshot meet while they write it (under_way.h): nobody has
  // to wait for them. Empty: there is none.
  std::string meeting;
  std::vector<std::string> faults;  // what is none to go on from, and why
  // The newest whose bytes are good and which is newer than what is stored, or that very save;
  // none: there is none. What is torn is passed over, with a warning. Collective, where the choice
  // is.
  std::function<LatestCheckpoint(const LatestCheckpoint& stored)> look;
};

// Of snapshots of the run of which this host has all ranks' parts. Their places are URLs of
// `arena`.
[[nodiscard]] KeptChoice kept_choice(const Location& run, const RunCheck& check);
// Of those of which the hosts of the ranks together have all parts: a host that lacks some reads
// those from others. Collective.
[[nodiscard]] KeptChoice kept_choice(const Location& run, const RunCheck& check, Group& group);

// What a training goes on from. The log says so where that is in memory. `stored` looks at what is
// stored, and throws where all of that is damaged or left, which a snapshot makes up for; `await`
// waits for saves that are under way, but those of a meeting.
[[nodiscard]] LatestCheckpoint newest_of(const KeptChoice& kept,
                                         const std::function<LatestCheckpoint()>& stored,
                                         const std::function<void(const std::string& but)>& await);

// The meeting of the newest one of this host; empty: there is none.
[[nodiscard]] std::string kept_meeting(const Location& run);
// Nobody goes on from snapshots of later steps of this run any more.
void forget_later(const Location& run, std::int64_t step);

}  // namespace tessera
