// Bytes of files that lie where their writer cannot reach them: they travel through the group to
// the files' makers, a bounded part at a time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <vector>

#include "comm/message.h"
#include "tessera/comm.h"
#include "tessera/io.h"

namespace tessera {

// Whose file the bytes are in, and which of the maker's.
struct Addressee {
  int maker = 0;
  std::uint32_t file = 0;
};

// What a rank has to send. Writers fill it on other threads, and wait while it is full.
class Outbox {
 public:
  explicit Outbox(std::size_t room) : room_(room) {}
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // A sink whose bytes go to `to`. It must not outlive this.
  [[nodiscard]] std::unique_ptr<ByteSink> sink(const Addressee& to, std::string name);
  // Throws `cancelled` when nobody takes anything any more.
  void put(const Addressee& to, std::uint64_t offset, ByteView bytes);
  // There is no more, or `failure` has ended it.
  void end(std::exception_ptr failure);
  void close();

  struct Batch {
    Bytes bytes;
    bool is_last = false;
  };
  // Waits until there is enough to send, or nothing more to come. Rethrows what has ended it.
  [[nodiscard]] Batch take();

 private:
  void put_some(const Addressee& to, std::uint64_t offset, ByteView bytes);

  const std::size_t room_;
  std::mutex mutex_;
  std::condition_variable changed_;
  MessageWriter pending_;       // guarded by mutex_, as all below
  bool has_ended_ = false;      // nothing more comes
  bool is_closed_ = false;      // nobody takes
  std::exception_ptr failure_;  // null: it ended well
};

struct Travel {
  // On a thread of its own: writes this rank's bytes into sinks of the outbox. Empty: it has none.
  std::function<void(Outbox& outbox)> send;
  // On the maker.
  std::function<void(std::uint32_t file, std::uint64_t offset, ByteView bytes)> receive;
  bool to_rank_zero = false;  // rank 0 makes all files
  std::stop_token stop;
};
// Returns when everything has been received. What one rank throws reaches all. Collective.
void travel(Group& group, const Travel& how);

}  // namespace tessera
