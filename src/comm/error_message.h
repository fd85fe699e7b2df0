// A rank's failure, and an Error as a message to other ranks.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>

#include "tessera/comm.h"

namespace tessera {

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

}  // namespace tessera
