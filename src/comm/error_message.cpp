// The form: code (1 byte); message, path, key (each a 4-byte length and its text); 1 byte whether
// an offset follows, the offset (8 bytes); 1 byte whether it is_no_checkpoint(); the number of
// peers (4 bytes), and for each its rank (4 bytes) and its error (4-byte length, this form).
// Numbers are little-endian.
#include "comm/error_message.h"

#include <new>
#include <utility>

#include "comm/message.h"

namespace tessera {
namespace {

// Peers of peers do not occur: from_peers is given local errors.
constexpr int kMaxDepth = 4;

// Of a group of one rank: the failure is that rank's own.
bool is_of_one(const std::string& message, const std::map<int, Error>& peers) {
  return peers.size() == 1 && peers.begin()->second.message() == message;
}

ErrorCode known_code(std::uint8_t number) {
  const auto code = static_cast<ErrorCode>(number);
  if (to_string(code) == "unknown") {
    throw Error(ErrorCode::corrupt,
                "an error message has the unknown code " + std::to_string(number));
  }
  return code;
}

Error decode(std::span<const std::byte> bytes, int depth) {
  if (depth > kMaxDepth) throw Error(ErrorCode::corrupt, "an error message is nested too deeply");
  MessageReader reader(bytes);
  const ErrorCode code = known_code(reader.number<std::uint8_t>());
  Error error(code, reader.text());
  std::string path = reader.text();
  std::string key = reader.text();
  const bool has_offset = reader.number<std::uint8_t>() != 0;
  const auto offset = reader.number<std::uint64_t>();
  const bool is_no_checkpoint = reader.number<std::uint8_t>() != 0;
  std::map<int, Error> peers;
  for (auto count = reader.number<std::uint32_t>(); count > 0; --count) {
    const auto rank = reader.number<std::int32_t>();
    peers.emplace(rank, decode(reader.block(), depth + 1));
  }
  if (!reader.at_end()) throw Error(ErrorCode::corrupt, "an error message has bytes after its end");
  if (!peers.empty()) {
    const int ranks = is_of_one(error.message(), peers) ? 1 : 2;
    return Error::from_peers(std::move(peers), ranks);
  }
  error.at_path(std::move(path)).at_key(std::move(key));
  if (has_offset) error.at_offset(offset);
  if (is_no_checkpoint) error.as_no_checkpoint();
  return error;
}

}  // namespace

Bytes encode_error(const Error& error) {
  MessageWriter message;
  message.number(static_cast<std::uint8_t>(error.code()));
  message.text(error.message()).text(error.path()).text(error.key());
  message.number(static_cast<std::uint8_t>(error.offset() ? 1 : 0));
  message.number(error.offset().value_or(0));
  message.number(static_cast<std::uint8_t>(error.is_no_checkpoint() ? 1 : 0));
  message.number(narrow<std::uint32_t>(error.peers().size()));
  for (const auto& [rank, failure] : error.peers())
    message.number(static_cast<std::int32_t>(rank)).block(encode_error(failure));
  return message.take();
}

Error decode_error(std::span<const std::byte> bytes) {
  return decode(bytes, 0);
}

std::optional<Error> failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::io, "no memory is left");
  } catch (const std::exception& error) {
    return Error(ErrorCode::io, error.what());
  } catch (...) {
    return Error(ErrorCode::io, "an exception that is no std::exception");
  }
  return std::nullopt;
}

Error with_loss(const Error& own, const Error& loss) {
  Error both(own.code(), own.message() + "; and the group was lost: " + loss.message());
  both.at_path(own.path()).at_key(own.key());
  if (own.offset()) both.at_offset(*own.offset());
  return both;
}

void add_failure(std::map<int, Error>& failures, int rank, const Error& failure) {
  const std::map<int, Error>& peers = failure.peers();
  if (peers.empty()) {
    failures.emplace(rank, failure);
  } else if (is_of_one(failure.message(), peers)) {
    failures.emplace(rank, peers.begin()->second);
  } else {
    failures.insert(peers.begin(), peers.end());
  }
}

}  // namespace tessera
