#include <exception>
#include <utility>

#include "comm/error_message.h"
#include "comm/whereabouts.h"
#include "tessera/comm.h"

namespace tessera {

void agree(Group& group, const std::string& operation, const std::function<void()>& work) {
  const std::optional<Error> mine = failure_of(work);
  std::vector<Bytes> reports;
  try {
    // Not `operation`, which may say something of this rank alone.
    const Purpose purpose("an agreement");
    reports = group.all_gather(mine ? encode_error(*mine) : Bytes());
  } catch (const Error&) {
    // The peers cannot be heard any more: what went wrong here says more than that.
    if (mine) throw Error(*mine).while_doing(operation);
    throw;
  }
  std::map<int, Error> failures;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].empty()) continue;
    add_failure(failures, static_cast<int>(rank), decode_error(reports[rank]));
  }
  if (failures.empty()) return;
  throw Error::from_peers(std::move(failures), group.size()).while_doing(operation);
}

}  // namespace tessera
