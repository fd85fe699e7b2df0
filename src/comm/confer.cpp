#include "comm/confer.h"

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <optional>
#include <utility>

#include "comm/message.h"
#include "comm/whereabouts.h"
#include "tessera/comm.h"

namespace tessera {

// The form: code, message, path, key, offset, whether it is_no_checkpoint(), and the number of
// peers, and for each its rank and its error, as fields (comm/message.h).

namespace {

// Peers of peers do not occur: from_peers is given local errors.
constexpr int kMaxDepth = 4;

// Whether the group had one rank: then the failure is that rank's own.
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
  const auto offset = reader.value<std::optional<std::uint64_t>>();
  const bool is_no_checkpoint = reader.value<bool>();
  std::map<int, Error> peers;
  for (auto count = reader.count(); count > 0; --count) {
    const auto rank = reader.number<std::int32_t>();
    peers.emplace(rank, decode(reader.block(), depth + 1));
  }
  if (!reader.at_end()) throw Error(ErrorCode::corrupt, "an error message has bytes after its end");
  if (!peers.empty()) {
    const int ranks = is_of_one(error.message(), peers) ? 1 : 2;
    return Error::from_peers(std::move(peers), ranks);
  }
  error.at_path(std::move(path)).at_key(std::move(key));
  if (offset) error.at_offset(*offset);
  if (is_no_checkpoint) error.as_no_checkpoint();
  return error;
}

}  // namespace

Bytes encode_error(const Error& error) {
  MessageWriter message;
  message.number(static_cast<std::uint8_t>(error.code()));
  message.text(error.message()).text(error.path()).text(error.key());
  return message.value(error.offset()).value(error.is_no_checkpoint()).value(error.peers()).take();
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

// The form of a message: what was contributed or concluded, if nobody has failed; the failures,
// each as its rank and its error; the bytes of these, and how many ranks failed (4 bytes each).

namespace {

constexpr std::size_t kNamed = 16;  // failures that travel; the others are only counted

struct Report {
  std::map<int, Error> failures;
  std::size_t failed = 0;  // ranks, with those that are not in `failures`
  Bytes content;           // empty if a rank failed

  void add(int rank, const Error& failure) {
    const std::size_t before = failures.size();
    add_failure(failures, rank, failure);
    failed += failures.size() - before;
    keep_lowest();
  }

  void keep_lowest() {
    while (failures.size() > kNamed) failures.erase(std::prev(failures.end()));
  }
};

// Behind the content, which may be large: so nothing has to be moved for it.
Bytes encode(Report report) {
  MessageWriter tail;
  for (const auto& [rank, failure] : report.failures)
    tail.number(static_cast<std::int32_t>(rank)).block(encode_error(failure));
  tail.number(narrow<std::uint32_t>(tail.size()));
  tail.number(narrow<std::uint32_t>(report.failed));
  return side_by_side(std::move(report.content), tail.take());
}

Report decode(Bytes message) {
  constexpr std::size_t kEnd = 8;
  if (message.size() < kEnd) throw Error(ErrorCode::corrupt, "a message between ranks ends early");
  const std::size_t end = message.size() - kEnd;
  MessageReader numbers(std::span<const std::byte>(message).subspan(end));
  const std::size_t tail = std::min<std::size_t>(numbers.number<std::uint32_t>(), end);
  Report report;
  report.failed = numbers.number<std::uint32_t>();
  for (MessageReader rest(std::span<const std::byte>(message).subspan(end - tail, tail));
       !rest.at_end();) {
    const auto rank = rest.number<std::int32_t>();
    report.failures.emplace(rank, decode_error(rest.block()));
  }
  message.resize(end - tail);
  report.content = std::move(message);
  return report;
}

// A failure that is known already, of the same rank, is not counted again: ranks that agreed with
// one another inside of their work report the same ones.
Report joined_reports(Report left, Report right, const Combine& combine, int rank) {
  if (left.failed == 0 && right.failed == 0) {
    const auto failure = failure_of(
        [&] { left.content = combine(std::move(left.content), std::move(right.content)); });
    if (!failure) return left;
    left.content.clear();
    left.add(rank, *failure);
    return left;
  }
  std::size_t known = 0;
  for (const auto& [peer, failure] : right.failures) known += left.failures.count(peer);
  left.failed += right.failed - std::min(known, right.failed);
  left.failures.merge(right.failures);
  left.keep_lowest();
  left.content.clear();
  return left;
}

Report report_of(int rank, const std::function<Bytes()>& work) {
  Report report;
  const auto failure = failure_of([&] { report.content = work(); });
  if (failure) report.add(rank, *failure);
  return report;
}

}  // namespace

Bytes confer(Group& group, const std::string& operation, const Conference& conference) {
  const int rank = group.rank();
  Report mine = report_of(rank, conference.contribute);
  std::optional<Error> own_failure;
  if (mine.failed > 0) own_failure = mine.failures.begin()->second;
  Report told;
  try {
    // Not `operation`, which may say something of this rank alone.
    const Purpose purpose("an agreement");
    Bytes all = group.fold(encode(std::move(mine)), [&](Bytes left, Bytes right) {
      return encode(joined_reports(decode(std::move(left)), decode(std::move(right)),
                                   conference.combine, rank));
    });
    Bytes conclusion;
    if (rank == 0) {
      Report report = decode(std::move(all));
      if (report.failed == 0) {
        report = report_of(rank, [&] { return conference.conclude(std::move(report.content)); });
      }
      conclusion = encode(std::move(report));
    }
    told = decode(group.spread(std::move(conclusion)));
  } catch (const Error& error) {
    if (own_failure) throw with_loss(*own_failure, error).while_doing(operation);
    throw;
  }
  if (told.failed == 0) return std::move(told.content);
  const std::size_t unnamed = told.failed - told.failures.size();
  throw Error::from_peers(std::move(told.failures), group.size(), unnamed).while_doing(operation);
}

Bytes combine_nothing(const Bytes& left, const Bytes& right) {
  static_cast<void>(left);
  static_cast<void>(right);
  return {};
}

void agree(Group& group, const std::string& operation, const std::function<void()>& work) {
  const auto contribute = [&work]() -> Bytes {
    work();
    return {};
  };
  (void)confer(group, operation, {contribute, combine_nothing, [](Bytes all) { return all; }});
}

}  // namespace tessera
