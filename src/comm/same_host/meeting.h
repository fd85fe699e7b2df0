// How ranks find out together whether they share a host, and map their shared memory.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "comm/same_host/exchange.h"

namespace tessera::same_host {

// Where ranks leave texts for each other: a c10d store, or a map in tests. What is posted stays.
class Board {
 public:
  virtual ~Board() = default;
  Board() = default;
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  virtual void post(const std::string& key, const std::string& text) = 0;
  // Nothing when nobody has posted `key` yet.
  [[nodiscard]] virtual std::optional<std::string> read(const std::string& key) = 0;
};

struct MeetOptions {
  bool wanted = true;                                 // false: this rank does not take part
  std::chrono::milliseconds deadline{5 * 60 * 1000};  // for the peers to come
  RingSize ring = {};
};

struct Meeting {
  std::unique_ptr<Exchange> exchange;  // null on all ranks or on none
  std::string reason;                  // of null: "rank 2: ..."
};

// Collective, over a board that no other meeting uses. The answer is an exchange when every rank
// wants one, all name the same host, and every rank has mapped the memory that rank 0 made: proved,
// not assumed. Throws `timeout` when a peer does not come, `peer_failed` when one has ended.
[[nodiscard]] Meeting meet(Board& board, int rank, int size, const MeetOptions& options);

}  // namespace tessera::same_host
