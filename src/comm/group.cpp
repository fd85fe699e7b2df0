#include <utility>

#include "tessera/comm.h"

namespace tessera {

// Overriders take the messages over.
// NOLINTBEGIN(performance-unnecessary-value-param)
Bytes Group::fold(Bytes mine, const Combine& combine) {
  std::vector<Bytes> messages = gather(mine, 0);
  if (messages.empty()) return {};
  Bytes all = std::move(messages.front());
  for (std::size_t rank = 1; rank < messages.size(); ++rank)
    all = combine(std::move(all), std::move(messages[rank]));
  return all;
}

Bytes Group::spread(Bytes message) {
  return broadcast(message, 0);
}
// NOLINTEND(performance-unnecessary-value-param)

}  // namespace tessera
