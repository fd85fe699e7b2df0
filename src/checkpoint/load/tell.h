// Rank 0 reads, and all ranks take what they want (checkpoint-rows P-19).
#pragma once

#include <cstddef>
#include <functional>
#include <stop_token>
#include <vector>

#include "checkpoint/load/fill.h"
#include "tessera/comm.h"

namespace tessera {

struct TellJob {
  const Checkpoint* from = nullptr;  // on rank 0: what it reads
  const Checkpoint& contents;        // the same leaves, on every rank
  std::vector<bool> wanted;          // by leaf, on every rank: some rank takes it
  // What this rank fills. `found` of each is a leaf of `contents`.
  const std::vector<Filling>& fillings;
  const Owners& owners;
  IoCounters& counters;
  Meter& meter;
  std::size_t batch = 4 << 20;  // bytes of elements that are told at once
};
// Collective: one way up and one way down the group for each batch, and one more. What a rank
// throws is thrown by all.
void tell_all(const TellJob& job, Group& group);

}  // namespace tessera
