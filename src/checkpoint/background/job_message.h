// What a save is to another process that has the same arena, but for its tree
// (open/arena_tree.h): the messages between a trainer and its writer.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "comm/message.h"
#include "tessera/checkpoint.h"
#include "tessera/save_options.h"
#include "tessera/value.h"

namespace tessera {

// Throws `unsupported` for options that are functions, but for hooks that only listen.
void require_sendable(const SaveOptions& options);
[[nodiscard]] Bytes message_of_options(const SaveOptions& options);
[[nodiscard]] SaveOptions options_from_message(ByteView message);

// Whether others may have the snapshot of such a save: a snapshot that is opened has the lowest
// rank's value where ranks have several.
[[nodiscard]] bool may_be_kept(const SaveOptions& options);

[[nodiscard]] Bytes message_of_result(const SaveResult& result);
[[nodiscard]] SaveResult result_from_message(ByteView message);

// An Event with its texts.
struct EventMessage {
  std::string job, phase, checkpoint;
  std::int32_t rank = 0;
  std::uint64_t nanoseconds = 0, bytes = 0;
  std::optional<Error> error = {};
};
auto fields(FieldsOf<EventMessage> auto& event) {
  return std::tie(event.job, event.phase, event.checkpoint, event.rank, event.nanoseconds,
                  event.bytes, event.error);
}

}  // namespace tessera
