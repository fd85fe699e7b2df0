#include <exception>
#include <utility>

#include "comm/error_message.h"
#include "tessera/comm.h"

namespace tessera {
namespace {

std::optional<Error> failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorCode::io, error.what());
  } catch (...) {
    return Error(ErrorCode::io, "an exception that is no std::exception");
  }
  return std::nullopt;
}

}  // namespace

void agree(Group& group, const std::string& operation, const std::function<void()>& work) {
  const std::optional<Error> mine = failure_of(work);
  std::vector<Bytes> reports;
  try {
    reports = group.all_gather(mine ? encode_error(*mine) : Bytes());
  } catch (const Error&) {
    // The peers cannot be heard any more: what went wrong here says more than that.
    if (mine) throw Error(*mine).while_doing(operation);
    throw;
  }
  std::map<int, Error> failures;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].empty()) continue;
    const Error failure = decode_error(reports[rank]);
    // `work` may itself have agreed with others: then the failures it learnt of are what counts.
    for (const auto& [peer, error] : failure.peers()) failures.emplace(peer, error);
    if (failure.peers().empty()) failures.emplace(static_cast<int>(rank), failure);
  }
  if (!failures.empty()) throw Error::from_peers(std::move(failures)).while_doing(operation);
}

}  // namespace tessera
