// The CRC-32 of every tensor of a state, from what each rank holds of it.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/together/share.h"
#include "comm/message.h"
#include "tessera/comm.h"
#include "tessera/verify.h"

namespace tessera {

// What is known of one tensor so far.
struct TensorSum {
  std::uint64_t bytes = 0;       // of parts, each counted once
  std::uint64_t difference = 0;  // zero if all that hold the same part hold equal bytes
  std::uint32_t terms = 0;       // of base/crc32.h
};
auto fields(FieldsOf<TensorSum> auto& sum) {
  return std::tie(sum.bytes, sum.difference, sum.terms);
}
using StateSums = std::vector<TensorSum>;  // in the order of the tensors

// A sum of all bytes that this rank holds. Those of tensors all of which is in `written` are not
// read again.
struct SumJob {
  int rank = 0;
  int ranks = 1;
  int threads = 1;
  std::stop_token stop = {};
};
[[nodiscard]] StateSums sum_state(const PlacedTensors& tensors, const TensorSums& written,
                                  const SumJob& job);
// Throws `mismatch` for another number of tensors.
void join_state_sums(StateSums& all, const StateSums& more);

// The digests of a state, from the sums of all ranks.
struct SummedState {
  StateDigests digests;
  std::vector<std::string> unlike;  // that differ between ranks
};
// Throws `incomplete` for a tensor that ranks do not have all of.
[[nodiscard]] SummedState summed(const PlacedTensors& tensors, const StateSums& sums);

// tessera-state.json (kStateFile), which has them beside a checkpoint.
[[nodiscard]] std::string state_file_text(const StateDigests& digests, const std::string& save_id);
// Whether it says that the checkpoint is that of this save.
[[nodiscard]] bool is_saved_as(const Store& checkpoint, const std::string& save_id);

// Whether all ranks of a save have the same state, outside of the trainer's (checkpoint-rows
// OQ-09).

// What else has to be the same, by names.
using NamedDigests = std::vector<std::pair<std::string, std::uint64_t>>;

// A digest of all that is no tensor, and of `more`.
[[nodiscard]] std::uint64_t digest_of_values(const OlmoState& state, const NamedDigests& more);

// All ranks call it once digests differ: it throws `mismatch` on each, naming all that ranks do not
// have alike. Collective.
void refuse_difference(const OlmoState& state, const NamedDigests& more,
                       const PlacedTensors& tensors, Group& group);

}  // namespace tessera
