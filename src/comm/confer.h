// How ranks decide together: every rank contributes, rank 0 concludes; a failure reaches all.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <stop_token>
#include <string>

#include "tessera/comm.h"

namespace tessera {

// A rank's failure, and an Error as a message to other ranks.

// Code, message, path, key, offset and the failures of peers.
[[nodiscard]] Bytes encode_error(const Error& error);
// Throws `corrupt` for bytes that encode_error did not make.
[[nodiscard]] Error decode_error(std::span<const std::byte> bytes);

// What `work` throws, as an Error.
[[nodiscard]] std::optional<Error> failure_of(const std::function<void()>& work);
// What a rank throws that fails while the others cannot be heard any more: its own failure says
// more, and may follow from theirs, so it tells of both.
[[nodiscard]] Error with_loss(const Error& own, const Error& loss);
// Adds what `rank` reported. What it learnt of others by agreeing with them itself counts instead
// of its own words; what it agreed on with nobody else is its own.
void add_failure(std::map<int, Error>& failures, int rank, const Error& failure);

// One way up the tree of a group and one way down: every rank contributes, rank 0 concludes, and
// all ranks get the conclusion or the same error.

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
