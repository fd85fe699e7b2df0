// Rank 0 reads (checkpoint-rows P-19), or each rank its own files, and all ranks take what they
// want.
#pragma once

#include <cstddef>
#include <functional>
#include <stop_token>
#include <vector>

#include "checkpoint/load/fill.h"
#include "checkpoint/read/storage_checks.h"
#include "tessera/comm.h"

namespace tessera {

struct TellJob {
  const Checkpoint* from = nullptr;  // on ranks that read: what they read
  const Checkpoint& contents;        // the same leaves, on every rank
  std::vector<bool> wanted;          // by leaf, on every rank: some rank takes it
  // What this rank fills. `found` of each is a leaf of `contents`.
  const std::vector<Filling>& fillings;
  const Owners& owners;
  IoCounters& counters;
  Meter& meter;
  // Each rank reads what its own files hold, and adds it to these. Null: rank 0 reads.
  StorageChecks* checks = nullptr;
  std::size_t batch = 4 << 20;  // bytes of elements that are told at once
};
// Collective: one way up and one way down the group for each batch, and one more. What a rank
// throws is thrown by all.
void tell_all(const TellJob& job, Group& group);

}  // namespace tessera
