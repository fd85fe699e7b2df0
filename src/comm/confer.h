// One way up the tree of a group and one way down: every rank contributes, rank 0 concludes, and
// all ranks get the conclusion or the same error.
#pragma once

#include <functional>
#include <stop_token>
#include <string>

#include "tessera/comm.h"

namespace tessera {

struct Conference {
  std::function<Bytes()> contribute;  // on every rank
  Combine combine;                    // any rank, if no rank has failed; may throw
  // On rank 0, if no rank has failed: what all ranks are told.
  std::function<Bytes(Bytes all)> conclude;
};

// Returns the conclusion on every rank. What any of the functions throws reaches every rank as with
// agree(). Collective: one fold and one spread.
Bytes confer(Group& group, const std::string& operation, const Conference& conference);

// Combines nothing: for conferences whose ranks contribute only their success.
[[nodiscard]] Bytes combine_nothing(const Bytes& left, const Bytes& right);

}  // namespace tessera
