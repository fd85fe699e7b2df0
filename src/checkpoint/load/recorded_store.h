// What one rank asked of a store while it opened a checkpoint, and a store that answers other ranks
// from that: they open the same checkpoint without asking theirs.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>

#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

// A store that notes what it answers. It is used up to finish(), and may be used after that.
class RecordingStore : public Store {
 public:
  // Ends the recording, and gives it. What failed is not in it, nor what was read beyond 256 MiB.
  [[nodiscard]] virtual Bytes finish() = 0;
};
[[nodiscard]] std::shared_ptr<RecordingStore> recording_store(std::shared_ptr<Store> store);

struct Replay {
  ByteView record;  // must outlive what is opened
  // What patient_store() gets.
  std::stop_token stop = {};
  std::function<bool()> is_replaced = [] { return false; };
};
// `store` as it answered the rank that recorded: what was asked there is not asked again, and
// everything else is. An object of another size than recorded is `conflict` when it is read. What
// the record knows is waited for (opened.h).
[[nodiscard]] std::shared_ptr<Store> replaying_store(std::shared_ptr<Store> store, Replay replay);

}  // namespace tessera
