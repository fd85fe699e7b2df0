// The form of a message: the number of ranks that failed (4 bytes), the number of failures that
// follow (4 bytes), each as its rank (4 bytes) and its error (4-byte length, encode_error); then,
// if nobody has failed, what was contributed or concluded. Numbers are little-endian.
#include "comm/confer.h"

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "base/endian.h"
#include "comm/error_message.h"
#include "comm/whereabouts.h"

namespace tessera {
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

Bytes encode(const Report& report) {
  Bytes bytes;
  append_le(bytes, narrow<std::uint32_t>(report.failed));
  append_le(bytes, narrow<std::uint32_t>(report.failures.size()));
  for (const auto& [rank, failure] : report.failures) {
    append_le(bytes, static_cast<std::int32_t>(rank));
    const Bytes error = encode_error(failure);
    append_le(bytes, narrow<std::uint32_t>(error.size()));
    bytes.insert(bytes.end(), error.begin(), error.end());
  }
  bytes.insert(bytes.end(), report.content.begin(), report.content.end());
  return bytes;
}

std::span<const std::byte> take(std::span<const std::byte>& rest, std::size_t size) {
  if (size > rest.size()) throw Error(ErrorCode::corrupt, "a message between ranks ends early");
  const auto taken = rest.first(size);
  rest = rest.subspan(size);
  return taken;
}

Report decode(const Bytes& message) {
  std::span<const std::byte> rest(message);
  Report report;
  report.failed = load_le<std::uint32_t>(take(rest, 4).data());
  for (auto count = load_le<std::uint32_t>(take(rest, 4).data()); count > 0; --count) {
    const auto rank = load_le<std::int32_t>(take(rest, 4).data());
    const auto size = load_le<std::uint32_t>(take(rest, 4).data());
    report.failures.emplace(rank, decode_error(take(rest, size)));
  }
  report.content.assign(rest.begin(), rest.end());
  return report;
}

// A failure that is known already, of the same rank, is not counted again: ranks that agreed with
// one another inside of their work report the same ones.
Report joined(Report left, Report right, const Combine& combine, int rank) {
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
  Report told;
  try {
    // Not `operation`, which may say something of this rank alone.
    const Purpose purpose("an agreement");
    const Bytes all = group.fold(encode(mine), [&](const Bytes& left, const Bytes& right) {
      return encode(joined(decode(left), decode(right), conference.combine, rank));
    });
    Bytes conclusion;
    if (rank == 0) {
      Report report = decode(all);
      if (report.failed == 0) {
        report = report_of(rank, [&] { return conference.conclude(std::move(report.content)); });
      }
      conclusion = encode(report);
    }
    told = decode(group.spread(std::move(conclusion)));
  } catch (const Error&) {
    // The peers cannot be heard any more: what went wrong here says more than that.
    if (mine.failed > 0) throw Error(mine.failures.begin()->second).while_doing(operation);
    throw;
  }
  if (told.failed == 0) return std::move(told.content);
  const std::size_t unnamed = told.failed - told.failures.size();
  throw Error::from_peers(std::move(told.failures), group.size(), unnamed).while_doing(operation);
}

Bytes combine_nothing(Bytes left, Bytes right) {
  static_cast<void>(left);
  static_cast<void>(right);
  return {};
}

}  // namespace tessera
