// The connection of a trainer to its writer process: frames, and with one a file descriptor.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "base/process.h"
#include "tessera/comm.h"
#include "tessera/io.h"

namespace tessera {

enum class FrameKind : std::uint8_t {
  // From the trainer.
  hello,     // who the writer is, first of all
  arena,     // the memory that trees from now on lie in, with its descriptor
  job,       // a save whose tree is staged; it waits for one of the next two
  go,        // all ranks have staged it
  drop,      // some rank has not
  stop,      // it is to end
  end,       // the trainer ends, and needs no more than what it has asked for
  partners,  // whose snapshots the process copies (partner_copies.h)
  // From the writer.
  begun,  // of a job: who opens the place sees that it is under way
  event,  // of a job
  progress,
  result,
  failure,
  address,  // where others read what it keeps; once, if it was asked to be a partner
  stays,    // it goes on with what it keeps, and is not waited for
  sign,     // of life
  log,
};

struct Frame {
  FrameKind kind{};
  std::uint64_t job = 0;  // its number; 0: it is about none
  Bytes content;
  Fd fd;  // none: the frame has none
};

// How long nothing was heard, as far as the waiter itself ran: of the time in which it was stopped,
// with the other side or without it, hardly anything counts.
class Silence {
 public:
  explicit Silence(std::chrono::milliseconds limit) : limit_(limit) {}

  // The waiter asks about so often.
  [[nodiscard]] std::chrono::milliseconds slice() const {
    return std::max(limit_ / 8, std::chrono::milliseconds(1));
  }
  void heard() {
    counted_ = {};
    last_ = Clock::now();
  }
  [[nodiscard]] bool is_over() {
    const auto now = Clock::now();
    counted_ += std::min<Clock::duration>(now - last_, slice());
    last_ = now;
    return counted_ >= limit_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  const std::chrono::milliseconds limit_;
  Clock::duration counted_{};
  Clock::time_point last_ = Clock::now();
};

// One thread receives and any may send, one at a time.
class Channel {
 public:
  explicit Channel(Fd socket) : socket_(std::move(socket)) {}
  // Two that are connected. Throws `io`.
  [[nodiscard]] static std::pair<Channel, Fd> pair();

  // Waits for room as long as `goes_on` says so, which is asked a few times a second. Throws `io`
  // when the other side has gone, and `timeout` when that says no. A frame that is not sent whole
  // ends the connection.
  void send(const Frame& frame, const std::function<bool()>& goes_on) const;
  // Whether there is room for what is sent: the other side reads.
  [[nodiscard]] bool has_room() const;
  // Whether something can be received, at the latest after `within`.
  [[nodiscard]] bool await(std::chrono::milliseconds within) const;
  // Null: the other side has gone. Throws `corrupt` for what is no frame.
  [[nodiscard]] std::optional<Frame> receive() const;
  // The other side hears that nothing more is sent.
  void end_sending() const noexcept;
  void end() const noexcept;

 private:
  [[nodiscard]] bool receive_all(MutableByteView bytes, Fd* fd) const;
  void send_all(ByteView bytes, int fd, const std::function<bool()>& goes_on) const;

  Fd socket_;
};

}  // namespace tessera
